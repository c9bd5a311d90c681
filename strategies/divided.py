"""Parameters of which processes have shards, as code beside the model uses them: a hook, train_step, an optimizer.

Such code has DTensors, some of whose operations give other numbers than on one device, and no error: a random number that
every shard repeats, a sum of this process's part, a write to a copy.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from ..core.base.errors import StrategyError
from ..core.base.tensors import dtype_name
from ..core.base.trees import tree_map_only
from ..core.checkpoint.chunks import fill
from ..core.torch_compat.dtensor_private import ITEM, dtensor_handlers, write_data
from ..core.torch_compat.torch_private import base_of, is_mutable, tree_flatten

_ATEN = torch.ops.aten


@functools.cache
def register_divided() -> None:
    """Let DTensors compute as one device does, or raise; once in a process. Random numbers need equal generators."""
    handlers = dtensor_handlers()
    handlers.update(dict.fromkeys(_writing(), _write))
    handlers.update(dict.fromkeys(_FILLING, _fill))
    handlers.update(dict.fromkeys(_SHAPED_LIKE, _draw_like))
    handlers[_ATEN.bernoulli.default] = _draw_with
    handlers[_ATEN.native_dropout.default] = _drop_out
    write_data(_set_data)
    handlers.update(dict.fromkeys((ITEM, _ATEN.equal.default), compute_whole))


@torch.no_grad()
def compute_whole(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute an operation from whole tensors on every process; ``item`` would give a summand of a pending sum."""
    mesh = next(leaf.device_mesh for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, DTensor))
    args, kwargs = tree_map_only(DTensor, lambda tensor: tensor.full_tensor(), (args, kwargs))
    replicated = (Replicate(),) * mesh.ndim
    found = operation(*args, **kwargs)
    return tree_map_only(Tensor, lambda tensor: DTensor.from_local(tensor, mesh, replicated, run_check=False), found)


def by_torch(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute an operation that has a function here by torch's rule."""
    handlers = dtensor_handlers()
    own = handlers.pop(operation)
    try:
        return operation(*args, **kwargs)
    finally:
        handlers[operation] = own


# Writes: torch gathers a view that is cut elsewhere than its tensor, such as one row, and the copy would be written to.


def _writing() -> list[Any]:
    """All operations that change values of their first argument, and not only how it is looked at."""
    names = [name for name in dir(Tensor) if name.endswith("_") and not name.startswith("_") and hasattr(_ATEN, name)]
    packets = [getattr(_ATEN, name) for name in names]
    operations = [getattr(packet, overload) for packet in packets for overload in packet.overloads()]
    return [each for each in operations if is_mutable(each) and torch.Tag.inplace_view not in each.tags]


@torch.no_grad()
def _write(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    if not isinstance(tensor, DTensor):  # of a module that no strategy divides, with a number of all parameters, say
        args, kwargs = tree_map_only(DTensor, lambda each: each.full_tensor(), (args, kwargs))
        return operation(*args, **kwargs)
    check_writable(tensor, operation.__name__.partition(".")[0])
    if operation is _ATEN.copy_.default and not isinstance(args[1], DTensor):
        _keep_shard(tensor, args[1].expand(tensor.shape))
        return tensor
    return by_torch(operation, args, kwargs)


def _set_data(tensor: DTensor, value: Tensor) -> None:
    """``tensor.data = value``: strategies and optimizers have the memory of the shard, so the values go there."""
    if value.shape != tensor.shape or value.dtype != tensor.dtype:
        given = f"{dtype_name(value.dtype)} of shape {tuple(value.shape)}"
        raise StrategyError(
            f"model: .data of a divided tensor becomes {given}, which must stay {dtype_name(tensor.dtype)} of shape {tuple(tensor.shape)}"
        )
    tensor.data.copy_(value)


def check_writable(tensor: Tensor, name: str) -> None:
    """Raise StrategyError if an operation in place would write to a copy, because the view was gathered."""
    base = base_of(tensor)
    if not isinstance(base, DTensor) or not isinstance(tensor, DTensor):
        return
    with torch.no_grad():
        own, whole = (one.to_local().untyped_storage().data_ptr() for one in (tensor, base))
    if own != whole:
        raise StrategyError(
            f"model: {name} writes to a view of a tensor whose shards were gathered for it, and would not change that tensor; change a "
            "whole one and give it back, whole = p.full_tensor(), p.copy_(whole), or compute a new one, as in q = q * scale"
        )


# Random numbers: each process draws those of the whole tensor, and keeps its shard's.
#
# On the CPU, processes with equal generators would draw the same for every shard, without an error. On accelerators
# torch gives every shard other numbers than one device has, after it has broadcast rank 0's state to all processes of the job:
# those of another stage do not draw at that time, and those of other samples would repeat its masks. Drawing for the whole
# tensor gives the numbers of one device and needs no message.


_FILLING = (_ATEN.bernoulli_.float, _ATEN.uniform_.default, _ATEN.normal_.default, _ATEN.exponential_.default)
_SHAPED_LIKE = (
    _ATEN.rand_like.default,
    _ATEN.randn_like.default,
    _ATEN.randint_like.default,
    _ATEN.randint_like.low_dtype,
)


@torch.no_grad()
def _fill(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operation that overwrites its tensor."""
    tensor = args[0]
    check_writable(tensor, operation.__name__.partition(".")[0])
    _keep_shard(tensor, operation(_empty_whole(tensor), *args[1:], **kwargs))
    return tensor


@torch.no_grad()
def _draw_like(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operation that makes a tensor of the shape of another."""
    return _shard_of(operation(_empty_whole(args[0]), *args[1:], **kwargs), args[0])


@torch.no_grad()
def _draw_with(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operation that needs the values of its tensor."""
    return _shard_of(operation(args[0].full_tensor(), *args[1:], **kwargs), args[0])


@torch.no_grad()
def _drop_out(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Dropout as accelerators compute it: the result, and what is kept."""
    tensor, rate, training = args
    if any(placement.is_partial() for placement in tensor.placements):
        summed = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
        tensor = tensor.redistribute(placements=summed)
    kept = _shard_of(operation(_empty_whole(tensor), rate, training)[1], tensor)
    local = tensor.to_local() * kept.to_local()
    if training is not False:
        local *= 1 / (1 - rate) if rate < 1 else 0.0
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    ), kept


def _empty_whole(tensor: DTensor) -> Tensor:
    # The order of memory is that in which numbers are drawn.
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _shard_of(whole: Tensor, like: DTensor) -> DTensor:
    local = torch.empty_like(like.to_local(), dtype=whole.dtype)
    shard = DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    _keep_shard(shard, whole)
    return shard


def _keep_shard(tensor: DTensor, whole: Tensor) -> None:
    """Copy what this process has of a tensor from the whole of it; of a pending sum the first process has all."""
    local = tensor.to_local()
    partial = [axis for axis, placement in enumerate(tensor.placements) if placement.is_partial()]
    if not partial:
        fill(tensor, whole)
    elif any(tensor.device_mesh.get_local_rank(axis) for axis in partial):
        local.zero_()  # the first process's summand is the whole sum
    else:
        local.copy_(whole)
