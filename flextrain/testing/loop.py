"""The training loop without the runner: what a strategy and an OptimWrapper must do together, and nothing else."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from ..core.comm.collectives import all_reduce
from ..core.device import to_device
from ..core.model import parse_losses, run_forward
from .models import Batch

if TYPE_CHECKING:
    from ..optim.wrapper import OptimWrapper
    from ..strategies.base import Strategy

T = TypeVar("T")


class Steps(Protocol):
    """A parameter scheduler, as far as the loop is concerned."""

    def step(self) -> None:
        """Move by one update."""


@dataclass
class Trace:
    """What happened, one entry per update; losses are means over the window and over all processes.

    Attributes:
        lrs: learning rates of all groups, in force during the update.
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
    """Part ``index`` of ``count`` of a global batch, in order; the first parts are one longer where it does not divide."""
    return {name: part.tensor_split(count)[index] for name, part in batch.items()}


def train(
    strategy: Strategy,
    model: nn.Module,
    optim: OptimWrapper,
    global_windows: Iterable[Sequence[Batch]],
    schedulers: Sequence[Steps] = (),
    after_update: Callable[[], object] | None = None,
) -> Trace:
    """One update per window, each process on its part of every global micro-batch.

    A model with ``loss_weight(batch)`` has its losses weighted, so that parts of unequal size count by their size.

    Args:
        strategy: set up, like ``model`` and ``optim``, which its ``setup`` returned.
        global_windows: the micro-batches of each update, before they are divided among the processes.
        schedulers: moved after each update that was not skipped.
        after_update: called after each update and the schedulers.
    """
    trace = Trace()
    model.train()
    for window in global_windows:
        parts = [shard(batch, *strategy.topology.shard) for batch in window]
        factors = loss_factors(strategy, parts)
        trace.lrs_seen.append([])
        losses = []
        for i, batch in enumerate(parts):
            trace.lrs_seen[-1].append(learning_rates(optim))
            optim.begin(i, len(parts))
            with strategy.grad_sync(i == len(parts) - 1):
                with strategy.autocast():
                    loss, _ = parse_losses(run_forward(model, to_device(batch, strategy.device)))
                loss = loss * factors[i]
                optim.backward(loss / len(parts))
            losses.append(loss.detach())
        trace.lrs.append(learning_rates(optim))
        info = optim.step()
        trace.losses.append(float(strategy.topology.data.mean(torch.stack(losses).float().mean())))
        trace.grad_norms.append(None if info.grad_norm is None else float(info.grad_norm))
        trace.skipped.append(info.skipped)
        if not info.skipped:
            for scheduler in schedulers:
                scheduler.step()
        if after_update:
            after_update()
    return trace


def loss_factors(strategy: Strategy, parts: Sequence[Batch]) -> Tensor:
    """What each micro-batch's mean loss is multiplied by so that every term of the window counts the same.

    A strategy averages over n parts of the data and the loop over ``len(parts)`` micro-batches; a part with the share s of
    all terms then needs the factor s * n * len(parts). Ones for a model without ``loss_weight``.
    """
    weight = getattr(strategy.module, "loss_weight", None)
    if weight is None:
        return torch.ones(len(parts))
    weights = torch.stack([weight(part) for part in parts])
    total = all_reduce(weights.sum())
    return weights / total * strategy.world_size * len(parts)


def evaluate(strategy: Strategy, model: nn.Module, batches: Iterable[Batch]) -> list[Tensor]:
    """The model's raw outputs without gradients, each process on its part of every batch; the model is left in training mode."""
    model.eval()
    outputs = []
    with torch.no_grad(), strategy.autocast():
        for batch in batches:
            part = to_device(shard(batch, *strategy.topology.shard), strategy.device)
            outputs.append(run_forward(model, part, mode="tensor").cpu())
    model.train()
    return outputs


def learning_rates(optim: OptimWrapper) -> list[float]:
    """The learning rate of every parameter group."""
    return [float(group["lr"]) for group in optim.param_groups]


@contextlib.contextmanager
def environ(**values: str | None) -> Iterator[None]:
    """Environment variables set, or with None removed, for the time of the context."""
    before = {name: os.environ.get(name) for name in values}
    _assign(values)
    try:
        yield
    finally:
        _assign(before)


def _assign(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def alone() -> contextlib.AbstractContextManager[None]:
    """A context in which this process finds the environment of a job of one process."""
    names: dict[str, Any] = dict.fromkeys(
        ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    )
    return environ(**names)
