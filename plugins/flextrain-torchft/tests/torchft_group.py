"""A process of a group that trains; the tests start several."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from flextrain import FlexibleRunner, Hook

SAMPLES, BATCH, ACCUMULATE, EPOCHS = 41, 6, 2, 3
# An epoch has 7 micro-batches. The last one has 5 samples, which two groups share unequally, and an update of its own.
UPDATES = EPOCHS * 4


class Numbered(Dataset[Any]):
    """Samples that know their number."""

    def __init__(self, samples: int = SAMPLES) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(samples, 5, generator=generator, dtype=torch.float64)
        self.y = torch.randn(samples, 1, generator=generator, dtype=torch.float64)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(index), self.x[index], self.y[index]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        self.unused = nn.Parameter(torch.ones(3, dtype=torch.float64))  # does not decay
        self.seen: list[list[int]] = []
        self.dies = False

    def forward(self, index: Tensor, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        if self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        self.seen.append(index.tolist())
        return {"loss": (self.layers(x) - y).square().mean()}


class Events(Hook):
    """Does what the test wants at an iteration, and notes which samples forward had for every update.

    Args:
        dies_at: iteration in whose forward the process is killed.
        saves_at: iteration after which it saves the checkpoint ``between``.
        waits: files, each with the iteration before which the process waits for it.
        pause: seconds before every iteration, until there is a file ``hurry`` beside the ``work_dir``.
    """

    def __init__(
        self,
        dies_at: int | None = None,
        saves_at: int | None = None,
        waits: dict[str, int] | None = None,
        pause: float = 0.0,
    ) -> None:
        self.dies_at, self.saves_at, self.waits, self.pause = dies_at, saves_at, waits or {}, pause

    def before_train(self, runner: Any) -> None:
        if runner.iter == 0:
            save(full(runner), runner, "initial.pt")

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        folder = Path(runner.work_dir)
        (folder / "arrived").touch()
        for name, iteration in self.waits.items():
            if runner.iter == iteration:
                until(Path(name))
                time.sleep(3)  # for the other group to ask
        if self.pause and not (folder.parent / "hurry").exists():
            time.sleep(self.pause)
        runner.strategy.module.seen.clear()
        runner.strategy.module.dies = runner.iter == self.dies_at

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        seen = runner.strategy.module.seen[-len(data_batch) :]  # those of the last try
        open_round = getattr(runner.strategy, "made", None)
        head = open_round[-1]["head"] if open_round else getattr(runner.strategy, "head", None)
        line = dict(update=runner.iter + 1, head=head, seen=seen, loss=outputs["loss"].item(), at=time.time())
        with open(Path(runner.work_dir) / f"seen_{runner.rank}.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")
        if runner.iter == self.saves_at:
            runner.save_checkpoint(runner.work_dir, "between")


def until(path: Path, limit_s: float = 300.0) -> None:
    end = time.monotonic() + limit_s
    while not path.exists():
        if time.monotonic() > end:
            raise TimeoutError(path)
        time.sleep(0.05)


def runner_of(
    work_dir: Path,
    strategy: dict[str, Any],
    hooks: list[Hook] | None = None,
    batch_size: int = BATCH,
    samples: int = SAMPLES,
    **more: Any,
) -> FlexibleRunner:
    loader = dict(
        dataset=Numbered(samples), batch_size=batch_size, num_workers=0, collate_fn="default_collate",
        sampler=dict(type="DefaultSampler", shuffle=True), drop_last=False,
    )  # fmt: skip
    options: dict[str, Any] = dict(
        model=Net,
        work_dir=work_dir,
        strategy=strategy,
        train_dataloader=loader,
        optim_wrapper=dict(
            optimizer=dict(type="AdamW", lr=0.02, weight_decay=0.1), accumulative_counts=ACCUMULATE, clip_grad=dict(max_norm=0.5)
        ),
        param_scheduler=[dict(type="LinearLR", start_factor=0.1, end=6, by_epoch=False), dict(type="StepLR", step_size=1, gamma=0.7)],
        train_cfg=dict(max_epochs=EPOCHS),
        randomness=dict(seed=7),
        custom_hooks=hooks or [],
        default_hooks=dict(logger=dict(interval=1)),
    )  # fmt: skip
    return FlexibleRunner(**{**options, **more})


def run(given: dict[str, Any], output: str, launched: dict[str, str]) -> None:
    """Train as a process that a launcher has given the variables ``launched``; what it prints is added to a file."""
    with open(output, "a") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    os.environ.update(launched)
    main(given)


def main(given: dict[str, Any]) -> None:
    folder = Path(given["folder"])
    if "after" in given:
        until(Path(given["after"]))
    inner = given.get("inner", dict(type="SingleDeviceStrategy", device="cpu"))
    strategy = dict(
        type="flextrain_torchft:TorchFTStrategy", inner=inner, lighthouse=given["lighthouse"],
        min_replicas=given.get("min_replicas", 1), exchange_timeout_s=given.get("exchange_timeout_s", 60.0),
        **given.get("rounds", {}),
    )  # fmt: skip
    runner = runner_of(
        folder, strategy, [Events(**given.get("events", {}))], given.get("batch_size", BATCH), **given.get("more", {})
    )
    runner.train()
    save(full(runner), runner, "weights.pt")
    runner.close()


def full(runner: Any) -> dict[str, Tensor]:
    from torch.distributed.tensor import DTensor

    state = runner.strategy.model_state()
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}


def save(weights: dict[str, Tensor], runner: Any, name: str) -> None:
    if runner.rank == 0:
        torch.save(weights, Path(runner.work_dir) / name)
