"""A training loop for tests: the runner's updates of a strategy and an OptimWrapper, without the rest of the runner."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from ..core.device.device import to_device
from ..core.model.base_model import run_forward
from ..optim.wrapper import OptimWrapper
from ..runner.loops.step import Stepper
from ..strategies.base import Strategy
from .models import Batch

T = TypeVar("T")


class Steps(Protocol):
    """The part of a parameter scheduler that the loop uses."""

    def step(self) -> None:
        """Move by one update."""


@dataclass
class Trace:
    """The record of a training, with one entry per update. Losses are means over the window and over all processes.

    Attributes:
        lrs: learning rates of all groups during the update.
        lrs_seen: the same, read before each micro-batch.
    """

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float | None] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    lrs: list[list[float]] = field(default_factory=list)
    lrs_seen: list[list[list[float]]] = field(default_factory=list)


def windows(batches: Sequence[T], size: int) -> list[list[T]]:
    """``batches`` in windows of ``size``; the last one may be shorter."""
    return [list(batches[start : start + size]) for start in range(0, len(batches), size)]


def shard(batch: Batch, index: int, count: int) -> Batch:
    """Part ``index`` of ``count`` of a global batch, in order. If they are not equal, the first parts are longer by one."""
    return {name: part.tensor_split(count)[index] for name, part in batch.items()}


def train(
    strategy: Strategy,
    model: nn.Module,
    optim: OptimWrapper,
    global_windows: Iterable[Sequence[Batch]],
    schedulers: Sequence[Steps] = (),
    after_update: Callable[[], object] | None = None,
) -> Trace:
    """Make one update per window; each process trains on its part of every global micro-batch.

    If the model has ``loss_weight(batch)``, losses are weighted, so that parts of unequal size count by their size.

    Args:
        strategy: a strategy after ``setup``; ``model`` and ``optim`` are the results of that call.
        global_windows: the micro-batches of each update, before they are divided among the processes.
        schedulers: stepped after each update that was not skipped.
        after_update: called after each update and the schedulers.
    """
    trace, stepper = Trace(), _Watched(strategy, model, optim)
    model.train()
    for window in global_windows:
        stepper.seen = []
        outputs = stepper.train([shard(batch, *strategy.topology.shard) for batch in window])
        trace.lrs_seen.append(stepper.seen)
        trace.lrs.append(learning_rates(optim))
        norm, skipped = outputs.get("grad_norm"), optim.last_step.skipped
        trace.losses.append(float(strategy.topology.data.mean(outputs["loss"].double().clone())))
        trace.grad_norms.append(None if norm is None else float(norm))
        trace.skipped.append(skipped)
        if not skipped:
            for scheduler in schedulers:
                scheduler.step()
        if after_update:
            after_update()
    return trace


class _Watched(Stepper):
    """Notes the learning rates before every micro-batch."""

    seen: list[list[float]]

    def begin(self, index: int) -> bool:
        self.seen.append(learning_rates(cast(OptimWrapper, self.optim)))
        return super().begin(index)


class _RawOutputs:
    """An EvalStep that returns the raw outputs of the model."""

    mode = "val"

    def __init__(self, strategy: Strategy, model: nn.Module) -> None:
        self._strategy, self._model = strategy, model

    def prepare(self, batch: Batch) -> Batch:
        found: Batch = to_device(batch, self._strategy.device)
        return found

    def predict(self, batch: Batch) -> Tensor:
        with self._strategy.autocast():
            output: Tensor = run_forward(self._model, self.prepare(batch), mode="tensor")
        return output.cpu()


def evaluate(strategy: Strategy, model: nn.Module, batches: Iterable[Batch]) -> list[Tensor]:
    """The model's raw outputs, each process on its part of every batch. Leaves the model in training mode.

    None for a batch of which a process has no outputs.
    """
    model.eval()
    step = _RawOutputs(strategy, model)
    with torch.no_grad():
        parts = (strategy.split(shard(batch, *strategy.topology.shard)) for batch in batches)
        outputs = [strategy.evaluate(part, step) for part in parts]
    model.train()
    return outputs


def learning_rates(optim: OptimWrapper) -> list[float]:
    """The learning rate of every parameter group."""
    return [float(group["lr"]) for group in optim.param_groups]


@contextlib.contextmanager
def environ(**values: str | None) -> Iterator[None]:
    """A context with these environment variables set, or removed where the value is None."""
    before = {name: os.environ.get(name) for name in values}
    assign_variables(values)
    try:
        yield
    finally:
        assign_variables(before)


def assign_variables(values: Mapping[str, str | None]) -> None:
    """Set these environment variables, and remove those whose value is None."""
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def alone() -> contextlib.AbstractContextManager[None]:
    """A context with the environment variables of a job of one process."""
    names: dict[str, Any] = dict.fromkeys(
        ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    )
    return environ(**names)
