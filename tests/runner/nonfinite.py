"""Hooks that make training go wrong, for tests of what happens then."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any

from flextrain import Hook
from flextrain.core.base.errors import NonFiniteError
from flextrain.core.checkpoint import is_marked


class BadBatch(Hook):
    """Puts a value into the input of some updates, on one rank."""

    priority = "HIGHEST"

    def __init__(self, *at: int, rank: int = 0, value: float = math.nan) -> None:
        self.at, self.rank, self.value = at, rank, value

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if runner.iter + 1 in self.at and runner.rank == self.rank:
            batch = data_batch[-1] if isinstance(data_batch, list) else data_batch
            batch["x"][0, 0] = self.value


class Poison(Hook):
    """Puts a value into the model after an update, before anything is saved; and takes it out again."""

    def __init__(self, at: int, name: str = "net.0.weight", value: float = math.nan, until: int = 10**9) -> None:
        self.at, self.name, self.value, self.until = at, name, value, until

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        tensor = dict(runner.strategy.module.state_dict(keep_vars=True))[self.name].detach()
        if runner.iter + 1 == self.at:
            tensor.view(-1)[0] = self.value
        if runner.iter + 1 == self.until:
            for parameter in runner.strategy.module.parameters():
                parameter.detach().fill_(0.1)
            for state in runner.optim_wrapper.optimizer.state.values():
                state.clear()


def train_badly(runner: Any) -> Any:
    """Train to the end with weights that are not finite, which ``train()`` says when all is done."""
    with contextlib.suppress(NonFiniteError):
        runner.train()
    return runner


def saved(folder: Path) -> dict[str, bool]:
    """The checkpoints, and whether each is marked."""
    return {path.parent.name: is_marked(path.parent) for path in sorted(folder.glob("*/manifest.json"))}


def warnings_in(folder: Path) -> list[str]:
    """What the log of the newest run in a folder says at least as a warning."""
    log = [path for path in sorted(folder.glob("*/*.log")) if "rank" not in path.name][-1].read_text().splitlines()
    return [
        line.partition(f" - {level} - ")[2]
        for line in log
        for level in ("WARNING", "ERROR")
        if f" - {level} - " in line
    ]
