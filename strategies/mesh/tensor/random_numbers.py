"""Random numbers of DTensors on the CPU: each process draws those of the whole tensor, and keeps its shard's.

DTensor coordinates generators of accelerators only. On the CPU, processes with equal generators would drop the same
elements of every shard, without an error. Drawing for the whole tensor gives the masks of one device.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ....core.dtensor_chunks import fill
from ....core.dtensor_private import dtensor_handlers

_ATEN = torch.ops.aten
_FILLING = (_ATEN.bernoulli_.float, _ATEN.uniform_.default, _ATEN.normal_.default, _ATEN.exponential_.default)
_SHAPED_LIKE = (
    _ATEN.rand_like.default,
    _ATEN.randn_like.default,
    _ATEN.randint_like.default,
    _ATEN.randint_like.low_dtype,
)


@functools.cache
def register_cpu_random_numbers() -> None:
    """Let DTensors on the CPU draw as one device does; once in a process. It needs equal generators."""
    handlers = dtensor_handlers()
    handlers.update(dict.fromkeys(_FILLING, _fill))
    handlers.update(dict.fromkeys(_SHAPED_LIKE, _draw_like))
    handlers[_ATEN.bernoulli.default] = _draw_with


@torch.no_grad()
def _fill(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operation that overwrites its tensor."""
    tensor = args[0]
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


@contextmanager
def drawing_apart(device_type: str, index: int) -> Iterator[None]:
    """Context in which processes with equal generators draw different numbers, by ``index``; they are equal again after it.

    What is drawn depends on the generator only, so that recomputed activations are the same. No accelerator waits.
    """
    if device_type == "cpu":
        generator = torch.default_generator
        seed = int(torch.randint(2**62, (), generator=generator))
        after = generator.get_state()
    else:
        module = torch.get_device_module(device_type)
        generator = module.default_generators[module.current_device()]
        state = generator.get_state()  # in the host's memory
        seed = int(np.random.SeedSequence([generator.initial_seed(), generator.get_offset()]).generate_state(1)[0])
        generator.set_offset(generator.get_offset() + 4)
        after, _ = generator.get_state(), generator.set_state(state)
    generator.manual_seed(seed + index)
    try:
        yield
    finally:
        generator.set_state(after)


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
    local = tensor.to_local()
    partial = [axis for axis, placement in enumerate(tensor.placements) if placement.is_partial()]
    if not partial:
        fill(tensor, whole)
    elif any(tensor.device_mesh.get_local_rank(axis) for axis in partial):
        local.zero_()  # the first process's summand is the whole sum
    else:
        local.copy_(whole)
