"""Sessions of a strategy in tests: build it, set up a model, train, gather the whole state, tear down."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..core.base.registry import STRATEGIES
from ..core.checkpoint import Checkpoint, FlatShard, save_checkpoint
from ..core.checkpoint.chunks import full_tensor
from ..core.comm import collectives as dist
from ..optim.wrapper import OptimWrapper
from ..strategies.base import Strategy
from .loop import Steps, Trace, alone, train
from .models import Batch, ConformanceNet, SmallModel

StrategyLike = str | Mapping[str, Any] | type[Strategy] | Callable[[], Strategy]
REFERENCE = "single"
SEED = 7
# Large, so that weights of a process that kept its own seed clearly differ.
SEED_STEP = 1000


@dataclass
class Session:
    """A strategy after ``setup``, with the model and the optimizer wrapper that it returned."""

    strategy: Strategy
    model: nn.Module
    optim: OptimWrapper


@dataclass
class TrainedSession:
    """A training run: the record of the loop, and the whole model before training and after each update."""

    trace: Trace
    weights: list[dict[str, Tensor]]


def make_strategy(spec: StrategyLike) -> Strategy:
    """The strategy that a registered name, a configuration, a class or a factory describes."""
    if isinstance(spec, (str, Mapping)):
        return STRATEGIES.build(spec, "strategy")  # type: ignore[no-any-return]
    return spec()


def with_class(spec: StrategyLike) -> StrategyLike:
    """``spec`` with the class in place of its name, because the name may not be registered in another process."""
    if isinstance(spec, (str, Mapping)):
        expanded = STRATEGIES.expand(spec, "strategy")
        return {**expanded, "type": STRATEGIES.resolve(expanded["type"], "strategy.type")}
    return spec


def strategy_name(spec: StrategyLike) -> str:
    """The name of the strategy in a report."""
    if isinstance(spec, Mapping):
        kind = spec.get("type")
        options = ", ".join(f"{key}={value!r}" for key, value in spec.items() if key != "type")
        return f"{getattr(kind, '__name__', kind)}({options})"
    return spec if isinstance(spec, str) else getattr(spec, "__name__", repr(spec))


@contextlib.contextmanager
def started(
    spec: StrategyLike, optim: OptimWrapper, model_class: type[SmallModel] = ConformanceNet, seed: int = SEED
) -> Iterator[Session]:
    """The strategy, set up with a model whose seed differs for every part of the data; torn down at the end."""
    strategy = make_strategy(spec)
    try:
        strategy.join()
        if hasattr(model_class, "sample"):
            strategy.example = partial(model_class.sample, strategy.topology.data.count, seed)  # as a runner gives one
        torch.manual_seed(seed + SEED_STEP * strategy.topology.data.index)
        model, built = strategy.setup(model_class(), optim)
        assert built is not None
        yield Session(strategy, model, built)  # type: ignore[arg-type]
    finally:
        strategy.leave()
        dist.destroy_process_group()


@contextlib.contextmanager
def single_device(
    optim: OptimWrapper,
    model_class: type[SmallModel] = ConformanceNet,
    seed: int = SEED,
    device: str | None = "cpu",
) -> Iterator[Session]:
    """The reference: one process with the whole batch and rank 0's seed. Each process can run its own.

    Args:
        device: the kind of device, as strategies take it; None: an accelerator, if the process sees one.
    """
    with alone():
        strategy = make_strategy({"type": REFERENCE, "device": device})
        torch.manual_seed(seed)
        model, built = strategy.setup(model_class(), optim)
        assert built is not None
        yield Session(strategy, model, built)  # type: ignore[arg-type]
        strategy.leave()


def run(session: Session, windows: Sequence[Sequence[Batch]], schedulers: Sequence[Steps] = ()) -> TrainedSession:
    """Train on the windows; record the whole model after each update."""
    strategy = session.strategy
    weights = [whole_model(strategy)]
    trace = train(
        strategy, session.model, session.optim, windows, schedulers, lambda: weights.append(whole_model(strategy))
    )
    return TrainedSession(trace, weights)


def whole_state(strategy: Strategy) -> dict[str, Any]:
    """The canonical state with every tensor whole, on every process; collective.

    Of tensors that several processes hold, each process returns its own copy, so that a comparison on every process finds
    a copy that differs.
    """
    state = strategy.state()
    local = {key: _whole(state[key]) for key in sorted(state)}
    # Most is on every process already, and objects travel slowly: only what some process lacks does.
    holders = [set(keys) for keys in dist.all_gather_object(list(local))]
    lacking = holders[0].union(*holders) - holders[0].intersection(*holders)
    if lacking:
        for part in dist.all_gather_object({key: local[key] for key in lacking if key in local}):
            local = {**part, **local}
    return local


def whole_model(strategy: Strategy) -> dict[str, Tensor]:
    """The ``model.`` part of ``whole_state``."""
    return {key: value for key, value in whole_state(strategy).items() if key.startswith("model.")}


def _whole(value: Any) -> Any:
    if isinstance(value, DTensor):
        value = full_tensor(value)
    elif isinstance(value, FlatShard):
        value = value.full_tensor()
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


def save(session: Session, path: Path) -> None:
    """Write the session's state to a checkpoint directory; collective."""
    save_checkpoint(path, {**session.strategy.state(), "optim.wrapper": session.optim.plain_values()})


def load(session: Session, path: Path) -> None:
    """Continue the session from a checkpoint directory; collective."""
    checkpoint = Checkpoint.open(path)
    template = session.strategy.template(checkpoint.saved)
    checkpoint.load(template)
    values = dict(checkpoint.values)
    session.optim.load_plain_values(values.pop("optim.wrapper"))
    session.strategy.load({**values, **template})
