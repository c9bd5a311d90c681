"""Small training runs for tests of the runner: data that says what was read of it, a model, hooks that look on."""

from __future__ import annotations

import json
import logging
import random
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.torch_version import TorchVersion
from torch.utils.data import Dataset

from flextrain import BaseMetric, FlexibleRunner
from flextrain.core.checkpoint import FlatShard, directory
from flextrain.core.checkpoint.manifest import MANIFEST, VALUES
from flextrain.runner import build_dataloader
from flextrain.runner.hooks import Hook

SGD = dict(type="SGD", lr=0.1, momentum=0.9)
DDP = dict(type="DDPStrategy")
FSDP = dict(type="FSDPStrategy", wrap=["Linear"])


def zero(stage: int, **config: Any) -> dict[str, Any]:
    return dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=stage, **config))


class Samples(Dataset[dict[str, Any]]):
    """Samples that can be told apart, and a file in which every reading is written down, by whichever process.

    Args:
        length: number of samples.
        log: the file; None keeps no record.
        noisy: add noise from the generators of Python, NumPy and torch, as augmentation does.
    """

    def __init__(self, length: int, log: str | Path | None = None, noisy: bool = False) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(length, 6, generator=generator)
        self.y = (self.x.sum(1) > 0).long()
        self.log, self.noisy = log, noisy

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.log is not None:
            with open(self.log, "a") as file:
                file.write(f"{index}\n")
        noise = random.random() + np.random.rand() + float(torch.rand(())) if self.noisy else 0.0
        return {"index": index, "x": self.x[index] + 0.1 * noise, "y": self.y[index]}

    def read(self) -> list[int]:
        """The samples that were read, in this order."""
        assert self.log is not None
        path = Path(self.log)
        return [int(line) for line in path.read_text().split()] if path.exists() else []


class Net(nn.Module):
    """A classifier with dropout, so that weights tell which random numbers were drawn."""

    def __init__(self, width: int = 8, dropout: float = 0.3) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Dropout(dropout), nn.Linear(width, 2))

    def forward(self, index: Any, x: Tensor, y: Tensor, mode: str = "tensor") -> Any:
        logits = self.net(x)
        if mode == "loss":
            return {"loss": functional.cross_entropy(logits.float(), y)}
        return logits if mode == "tensor" else {"index": index, "logits": logits, "y": y}


class Weighted(nn.Module):
    """The mean over items that are not left out; in float64, so that sums may be taken in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 1, bias=False).double()
        nn.init.constant_(self.net.weight, 0.1)

    def forward(self, index: Any, x: Tensor, y: Tensor, mode: str = "loss") -> Any:
        kept = y == 1
        return {"loss": ((self.net(x[kept].double()) - 1) ** 2).sum() / kept.sum()}

    def loss_weight(self, data_batch: Any) -> Tensor:
        return (data_batch["y"] == 1).sum()


class Accuracy(BaseMetric):
    """The share of right answers, how many there were, and which samples they belong to, as they came."""

    def process(self, data_batch: Any, data_samples: Any) -> None:
        right = data_samples["logits"].argmax(1) == data_samples["y"]
        self.results += list(zip(data_samples["index"].tolist(), right.tolist(), strict=True))

    def compute_metrics(self, results: list[Any]) -> dict[str, Any]:
        return {
            "accuracy": 100.0 * sum(right for _, right in results) / max(len(results), 1),
            "count": len(results),
            "indices": [index for index, _ in results],
        }


class Watch(Hook):
    """Writes down what was trained on, and the learning rate with which: one entry per update."""

    priority = "VERY_HIGH"

    def __init__(self) -> None:
        self.trained: list[list[int]] = []
        self.rates: list[float] = []
        self.losses: list[Tensor] = []

    def before_train_iter(self, runner: FlexibleRunner, batch_idx: int, data_batch: Any = None) -> None:
        window = data_batch if isinstance(data_batch, list) else [data_batch]
        self.trained.append([int(i) for batch in window for i in batch["index"]])
        optim = runner.optim_wrapper
        assert optim is not None
        self.rates.append(optim.param_groups[0]["lr"])

    def after_train_iter(
        self, runner: FlexibleRunner, batch_idx: int, data_batch: Any = None, outputs: Mapping[str, Any] | None = None
    ) -> None:
        assert outputs is not None
        self.losses.append(outputs["loss"])


class At(Hook):
    """Calls a function at a hook point, with the runner and what else a hook is given there."""

    def __init__(self, point: str, function: Callable[..., object], priority: str = "NORMAL") -> None:
        setattr(self, point, function)
        self.priority = priority


class Outputs(Hook):
    """Keeps what every update gave to log, as it came."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Tensor]] = []

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        self.seen.append(outputs)


class SaveEvery(Hook):
    """Saves ``iter_<n>`` after the updates whose numbers it is given; None: after every one."""

    priority = "LOWEST"

    def __init__(self, at: set[int] | None = None) -> None:
        self.at = at

    def after_train_iter(
        self, runner: FlexibleRunner, batch_idx: int, data_batch: Any = None, outputs: Mapping[str, Any] | None = None
    ) -> None:
        done = runner.iter + 1
        if self.at is None or done in self.at:
            runner.save_checkpoint(runner.work_dir, f"iter_{done}")


class Stop(Exception):
    """What StopAt raises."""


class StopAt(Hook):
    """Ends training after an update, as a crash would."""

    priority = "LOWEST"

    def __init__(self, at: int) -> None:
        self.at = at

    def after_train_iter(
        self, runner: FlexibleRunner, batch_idx: int, data_batch: Any = None, outputs: Mapping[str, Any] | None = None
    ) -> None:
        if runner.iter + 1 == self.at:
            raise Stop


def configuration(folder: Path | str, **changes: Any) -> dict[str, Any]:
    """Three epochs of seven batches, the last of which is smaller, without validation and without checkpoints."""
    config = dict(
        model=Net,
        work_dir=str(folder),
        train_dataloader=dict(batch_size=4, dataset=Samples(26), collate_fn="default_collate"),
        optim_wrapper=dict(optimizer=SGD),
        train_cfg=dict(by_epoch=True, max_epochs=3),
        default_hooks=dict(checkpoint=None),
        randomness=dict(seed=1),
        log_level="ERROR",
    )
    return {key: value for key, value in {**config, **changes}.items() if value is not None}


def make_runner(folder: Path | str, **changes: Any) -> FlexibleRunner:
    """A runner of ``configuration``; None removes an entry."""
    return FlexibleRunner(**configuration(folder, **changes))


def validation(length: int = 10, **dataloader: Any) -> dict[str, Any]:
    """The three parts of validation."""
    return dict(
        val_dataloader=dict(batch_size=4, dataset=Samples(length), collate_fn="default_collate", **dataloader),
        val_cfg=dict(),
        val_evaluator=dict(type=Accuracy),
    )


def whole(tensor: Any) -> Any:
    """The whole of a tensor that may be divided over the processes."""
    return tensor.full_tensor() if isinstance(tensor, (DTensor, FlatShard)) else tensor


def whole_state(runner: FlexibleRunner) -> dict[str, Any]:
    """Everything that training has changed, whole: weights and their averages, optimizer, schedules, loss scale."""
    state = dict(runner.strategy.state())
    for hook in runner.hooks:
        state |= {f"hook.{key}": value for key, value in hook.state_dict().items()} if hook.holds_weights else {}
    state = {key: whole(value).detach().clone() if isinstance(value, Tensor) else value for key, value in state.items()}
    assert runner.optim_wrapper is not None
    state["wrapper"] = runner.optim_wrapper.plain_values()
    state["schedulers"] = {name: [s.state_dict() for s in group] for name, group in runner.schedulers.items()}
    return state


def change_values(path: Path, change: Callable[[Any], Any]) -> None:
    """Change the plain values of a checkpoint, whose checksums stay right."""
    values = json.loads((path / VALUES).read_text())
    change(values)
    manifest = json.loads((path / MANIFEST).read_text())
    del manifest["xxh3"]
    manifest["files"][VALUES] = directory.write_file(path / VALUES, json.dumps(values).encode()).model_dump()
    directory.seal(path, json.dumps(manifest).encode())


def built_loader(cfg: Any, shard: tuple[int, int] = (0, 1), training: bool = True, seed: int = 5) -> Any:
    """What the runner makes of ``train_dataloader`` on one of several processes."""
    logger = logging.getLogger("flextrain")
    return build_dataloader(
        cfg, training=training, seed=seed, shard=shard, where="train_dataloader", logger=logger
    )  # fmt: skip


def data_workers(count: int) -> dict[str, Any]:
    """Options of a dataloader with ``count`` workers, forked: faster than what is the default outside of pytest's process."""
    if not count:
        return {}
    # With torch 2.6 forked workers give no batch beside a group.
    is_safe = TorchVersion(torch.__version__) >= "2.7"
    return dict(num_workers=count, **(dict(multiprocessing_context="fork") if is_safe else {}))


def differences(found: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """The keys that are not equal, bit for bit."""
    return [key for key in sorted(found.keys() | expected.keys()) if not _equal(found.get(key), expected.get(key))]


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    return bool(a == b)


Changes = Callable[[Path], dict[str, Any]]


@contextmanager
def log_lines(level: int = logging.WARNING) -> Iterator[list[str]]:
    """The messages of this level and above, as they come."""
    found: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("flextrain")
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)


@contextmanager
def refuses(
    error: type[Exception], says: str = "", *, begins: str = "", exactly: str = "", matches: str = ""
) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """An error is raised, whose message is one line and says what is given."""
    with pytest.raises(error) as caught:
        yield caught
    message = str(caught.value)
    assert says in message, message
    assert message.startswith(begins), message
    assert exactly in ("", message), message
    assert re.search(matches, message), message
    assert "\n" not in message, message
