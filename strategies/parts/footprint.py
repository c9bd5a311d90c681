"""The bytes of what a process keeps between updates, from shapes and dtypes alone."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import singledispatch
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ...core.base.trees import tensors_in
from ...core.checkpoint.chunks import FlatShard
from ...optim.adapters import OF_OTHERS, updates_matrices
from ..base import Strategy

Sizes = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor."""


@dataclass(frozen=True)
class StateMemory:
    """Bytes that one process keeps from update to update; not activations, buffers of communication, or what torch caches.

    Attributes:
        parameters: of the model, with buffers.
        gradients: of the trainable parameters, once all have one.
        optimizer_state: moments and the like, with float32 masters; None: the optimizer creates them in its first update, in
            a way that only it knows.
        note: where a part of it is, if that is not the device.
    """

    parameters: int
    gradients: int
    optimizer_state: int | None
    note: str = ""

    @property
    def total(self) -> int:
        """The sum of what is known."""
        return self.parameters + self.gradients + (self.optimizer_state or 0)


@singledispatch
def state_memory(strategy: Strategy) -> StateMemory:
    """Return the bytes of the parameters, gradients and optimizer state that this process keeps; after ``setup``.

    They follow from shapes and dtypes: nothing is computed on the device, and no process waits for another.
    """
    module, optim = strategy.module, strategy.optim
    kept = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    wrappers = optim.wrappers.values() if optim is not None else ()
    states = [state_of_optimizer(wrapper.optimizer) for wrapper in wrappers]
    elsewhere = {p.device.type for p in trained} - {strategy.device.type}
    return StateMemory(
        parameters=sum(map(size_of, kept.values())),
        gradients=sum(map(size_of, trained)) if optim is not None else 0,
        optimizer_state=None if None in states else sum(state or 0 for state in states),
        note="kept in host memory" if elsewhere == {"cpu"} else "",
    )


def kept_tensors(strategy: Strategy) -> Iterator[Tensor]:
    """Yield the tensors that this process keeps between updates, some of them several times; after ``setup``.

    These are parameters, with what an engine has put into their attributes, buffers, what optimizers update, and their state.
    Buffers of communication are not among them.
    """
    for parameter in strategy.module.parameters():
        yield parameter
        yield from (value for value in vars(parameter).values() if isinstance(value, Tensor))
    yield from strategy.module.buffers()
    for wrapper in strategy.optim.wrappers.values() if strategy.optim is not None else ():
        yield from (parameter for group in wrapper.param_groups for parameter in group["params"])
        yield from tensors_in([*wrapper.optimizer.state.values()])
    for value in strategy.state().values():  # what only a subclass has, too
        if isinstance(value, Tensor):
            yield value.to_local() if isinstance(value, FlatShard) else value


def size_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor that this process holds: of a sharded one its shard."""
    local = local_of(tensor)
    return local.numel() * local.element_size()


def local_of(tensor: Tensor) -> Tensor:
    """Return what this process holds of a tensor."""
    return tensor.detach() if not isinstance(tensor, DTensor) else tensor.to_local().detach()


def state_of_optimizer(optimizer: Optimizer) -> int | None:
    """Return the bytes of an optimizer's state on this process, after its first update; None if it cannot be known before."""
    shaped = (
        (tuple(local_of(parameter).shape), parameter.dtype, group)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad and not optimizer.state.get(parameter)
    )
    missing = state_of_shapes(optimizer, shaped)
    if missing is None:
        return None
    return missing + sum(
        size_of(value)
        for state in optimizer.state.values()
        if isinstance(state, dict)
        for value in state.values()
        if isinstance(value, Tensor)
    )


def state_of_shapes(
    optimizer: Optimizer, shaped: Iterable[tuple[tuple[int, ...], torch.dtype, dict[str, Any]]]
) -> int | None:
    """Return the bytes of the state that an optimizer creates for parameters of these shapes, in these of its groups.

    A copy of it updates tensors without memory. Only torch's own optimizers are known to allow that; for others the result
    is None.
    """
    known: dict[tuple[Sizes, int], int] = {}
    total = 0
    for shape, dtype, group in shaped:
        has_others = updates_matrices(type(optimizer))
        if has_others and not group.get(OF_OTHERS):
            total += math.prod(shape) * dtype.itemsize  # the momentum
            continue
        own: Optimizer | None = optimizer.others if has_others else optimizer  # type: ignore[attr-defined]
        if own is None or not type(own).__module__.startswith("torch.optim"):
            return None
        key = ((shape, dtype), id(group))
        if key not in known:
            found = _created(own, shape, dtype, group)
            if found is None:
                return None
            known[key] = found
        total += known[key]
    return total


def _created(optimizer: Optimizer, shape: tuple[int, ...], dtype: torch.dtype, group: dict[str, Any]) -> int | None:
    parameter = torch.nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
    parameter.grad = torch.empty_like(parameter)
    copied = object.__new__(type(optimizer))
    copied.__dict__.update(vars(optimizer))
    copied.state = type(optimizer.state)(dict)
    simple: dict[str, Any] = {
        key: False for key in ("foreach", "fused", "capturable", "differentiable") if key in group
    }
    copied.param_groups = [{**group, "params": [parameter], **simple}]
    step = inspect.unwrap(type(optimizer).step)  # without hooks and the profiler, which belong to real updates
    try:
        with torch.no_grad():
            step(copied)
    except (RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError):  # it needs values
        return None
    return sum(
        value.numel() * value.element_size() for value in copied.state[parameter].values() if isinstance(value, Tensor)
    )
