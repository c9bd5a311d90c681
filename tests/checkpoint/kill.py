"""Kills one training again and again, each time at a random moment of a save, and looks at what it goes on from.

    python tests/checkpoint/kill.py [--runs 100] [--seed 0]

The training saves every few updates and keeps two checkpoints, so that beginning, writing, naming and deleting are all
met. After each kill the newest checkpoint has to be complete: every byte has its checksum, and all tensors are, bit for
bit, those that the same training had after that update when nobody disturbed it. What may be lost is the save under way.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import multiprocessing
import random
import signal
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flextrain import FlexibleRunner
from flextrain.core.checkpoint import Checkpoint, find_latest, is_checkpoint
from flextrain.runner.hooks import Hook

# A process that has torch already: starting one takes as long as ten kills.
FORK = multiprocessing.get_context("fork")
INTERVAL = 2  # updates between two saves
SAVES = 3  # a process is killed in one of so many
PATIENCE_S = 60.0


class Net(nn.Module):
    """0.8 MB, with the optimizer's state 2.4 MB: long enough to write for a kill to meet it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 320), nn.Tanh(), nn.Linear(320, 600), nn.Tanh(), nn.Linear(600, 2))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.layers(x), y)}


class Digests(Hook):
    """Tells the state after each update, in a few bytes."""

    priority = "LOWEST"

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe

    def after_train_iter(
        self, runner: FlexibleRunner, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        self.pipe.send((runner.iter + 1, digest(runner.strategy.state())))


class Announce(Hook):
    """Tells where the run began, and every save as it begins."""

    priority = "LOWEST"

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe

    def before_train(self, runner: FlexibleRunner) -> None:
        self.pipe.send(runner.iter)

    def before_save_checkpoint(self, runner: FlexibleRunner, checkpoint: dict[str, Any]) -> None:
        self.pipe.send(runner.iter + 1)


@dataclass
class Figures:
    """What was seen in all kills together."""

    kills: int = 0
    in_a_save: int = 0  # the checkpoint that was being saved was not there yet
    leftovers: int = 0  # something unfinished stood beside the checkpoints
    lost: list[int] = field(default_factory=list)  # updates between the announced save and what was resumed
    save_s: float = 0.0
    seconds: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.kills} kills in {self.seconds:.0f} s, {self.in_a_save} before the save (about {1e3 * self.save_s:.0f} ms) "
            f"was complete, {self.leftovers} of them left something unfinished; every one was resumed from a complete "
            f"checkpoint, lost was at most {max(self.lost, default=0)} updates of {INTERVAL} between two saves"
        )


def digest(state: Mapping[str, Any]) -> str:
    """Of all tensors, with their names."""
    found = hashlib.sha256()
    for key in sorted(state):
        if isinstance(state[key], Tensor):
            found.update(key.encode())
            found.update(state[key].detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def train(folder: Path, updates: int, background: bool, hooks: list[Hook], saves: bool = True) -> None:
    """In a process of its own: go on from the newest checkpoint, if there is one."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 8, generator=generator)
    data = [{"x": row, "y": (row.sum() > 0).long()} for row in x]
    checkpoint = dict(by_epoch=False, interval=INTERVAL, max_keep_ckpts=2, save_last=False, async_save=background)
    runner = FlexibleRunner(
        model=Net,
        work_dir=str(folder),
        strategy=dict(type="SingleDeviceStrategy", device="cpu"),
        train_dataloader=dict(batch_size=4, dataset=data, collate_fn="default_collate"),
        optim_wrapper=dict(optimizer=dict(type="AdamW", lr=1e-3)),
        train_cfg=dict(by_epoch=False, max_iters=updates),
        default_hooks=dict(checkpoint=checkpoint if saves else None),
        custom_hooks=hooks,
        randomness=dict(seed=1),
        log_level="ERROR",
        resume=saves,
    )
    runner.train()


def fork(folder: Path, updates: int, background: bool, hook: type[Hook], saves: bool = True) -> tuple[Any, Connection]:
    """``train`` in a process, and the pipe that ``hook`` speaks into."""
    ours, theirs = FORK.Pipe(duplex=False)
    process = FORK.Process(target=train, args=(folder, updates, background, [hook(theirs)], saves))  # type: ignore[call-arg]
    process.start()
    theirs.close()
    return process, ours


def undisturbed(folder: Path, updates: int) -> dict[int, str]:
    """Of a training that is not killed, and saves nothing, the digest after each update."""
    process, pipe = fork(folder, updates, False, Digests, saves=False)
    found = dict(pipe.recv() for _ in range(updates))
    process.join()
    return found


def save_seconds(folder: Path, background: bool) -> float:
    """The median time from the announcement of a save until ``latest`` names it."""
    process, pipe = fork(folder, 10 * INTERVAL, background, Announce)
    assert pipe.recv() == 0
    times = []
    for _ in range(9):
        saved, begin = pipe.recv(), time.perf_counter()
        while newest(folder) < saved:
            time.sleep(0.0002)
        times.append(time.perf_counter() - begin)
    process.kill()
    process.join()
    return float(np.median(times))


def newest(folder: Path) -> int:
    """The update that ``latest`` names; 0 without."""
    latest = folder / "latest"
    return int(latest.read_text().rpartition("_")[2]) if latest.exists() else 0


def check(path: Path, expected: Mapping[int, str]) -> int:
    """The number of updates in a checkpoint, after every byte of it was compared."""
    checkpoint = Checkpoint.open(path)
    template = {key: torch.empty(info.shape, dtype=info.dtype) for key, info in checkpoint.tensors.items()}
    checkpoint.load(template)
    done = int(checkpoint.values["loop"]["iter"])
    assert path.name == f"iter_{done}"
    assert digest(template) == expected[done], f"{path} holds something else than the training had"
    return done


def kill_again_and_again(folder: Path, runs: int, seed: int, background: bool) -> Figures:
    """See the module.

    Raises:
        AssertionError: something else than what the module says.
    """
    begin, chance, figures = time.perf_counter(), random.Random(seed), Figures()
    updates = INTERVAL * SAVES * runs + 1
    expected = undisturbed(folder / "undisturbed", updates)
    figures.save_s = save_seconds(folder / "timing", background)
    work_dir, done = folder / "killed", 0
    while figures.kills < runs:
        process, pipe = fork(work_dir, updates, background, Announce)
        assert pipe.poll(PATIENCE_S), "it does not begin"
        assert pipe.recv() == done, "it goes on from somewhere else"
        for _ in range(chance.randint(1, SAVES)):
            assert pipe.poll(PATIENCE_S), "it does not come to its next save"
            saving = pipe.recv()
        time.sleep(chance.uniform(0, 1.2 * figures.save_s))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL, f"it ended before it was killed, with {process.exitcode}"
        figures.kills += 1
        figures.leftovers += any(path.name.startswith(".") for path in work_dir.iterdir())
        latest = find_latest(work_dir)
        done = 0 if latest is None else check(latest, expected)
        with contextlib.suppress(EOFError):
            while True:  # what it began before the signal came
                saving = pipe.recv()
        assert done >= saving - INTERVAL, f"it was saving {saving}, and goes on from {done}"
        figures.in_a_save += done < saving
        figures.lost.append(saving - done)
        for path in filter(is_checkpoint, work_dir.glob("iter_*")):  # one that was being deleted is none
            check(path, expected)
    process, pipe = fork(work_dir, done + 3 * INTERVAL, background, Announce)
    process.join()
    assert process.exitcode == 0
    assert newest(work_dir) == done + 3 * INTERVAL
    check(work_dir / f"iter_{newest(work_dir)}", expected)
    rest = [path.name for path in work_dir.iterdir() if path.name.startswith((".", "iter_"))]
    assert len(rest) == 2, f"leftovers are not cleared away: {', '.join(sorted(rest))}"
    figures.seconds = time.perf_counter() - begin
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=100, help="kills of each kind of save")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for background in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            figures = kill_again_and_again(Path(folder), arguments.runs, arguments.seed, background)
        print(f"{'asynchronous' if background else 'synchronous'}: {figures}", flush=True)


if __name__ == "__main__":
    main()
