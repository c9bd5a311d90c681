"""Chunks of a DTensor that a process holds: several for strided shards (``_StridedShard``).

torch uses ``_StridedShard(dim, split_factor)`` for two reasons:

- Tensor parallelism shards a dimension first and FSDP divides its shards, but the mesh has FSDP's axis first. The split
  factor is then the number of shards that the axes to the right have made.
- A projection holds several matrices (gate and up; query, key and value), and every process gets a shard of each. The
  split factor is then the number of matrices.

torch's ``full_tensor()`` and checkpoint planners are wrong for some of these layouts: for the second kind under FSDP
along the same dimension, and for uneven sizes. ``full_tensor()`` hangs where FSDP leaves a process without a shard.
The functions here shard in the order in which the axes did.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from .shard_spans import Cut, begins, own_spans

Offsets = tuple[int, ...]


def cut_more_than_once(tensor: DTensor) -> bool:
    """Whether several axes of the mesh shard it, or one does in strides: torch may be wrong for these layouts."""
    sharding = (
        placement for placement in tensor.placements if not (placement.is_replicate() or placement.is_partial())
    )
    return sum(map(_split_factor, sharding)) > 1


def chunks_of(tensor: DTensor) -> dict[Offsets, Tensor]:
    """The local shard as chunks: offsets in the whole tensor to a view of the local tensor.

    Raises:
        ValueError: the shape of the local tensor does not match the placements, or a sum over processes is pending.
    """
    cuts = cuts_of(tensor.placements)
    local = cast(DTensor, tensor.detach()).to_local()
    coordinates = tensor.device_mesh.get_coordinate()
    if coordinates is None:  # this process is not in the mesh
        return {}
    spans = [
        own_spans(size, dim, cuts, tuple(tensor.device_mesh.shape), coordinates)
        for dim, size in enumerate(tensor.shape)
    ]
    if tensor.numel() == 0:  # a checkpoint needs the shape of a tensor without elements too
        return {(0,) * tensor.dim(): local.new_empty(tensor.shape)}
    shape = tuple(sum(end - begin for begin, end in own) for own in spans)
    if math.prod(shape) == local.numel() == 0:  # FSDP may give an empty shard any shape
        return {}
    if tuple(local.shape) != shape:
        raise ValueError(f"has a part of shape {tuple(local.shape)} where {tensor.placements} gives {shape}")
    views: dict[Offsets, Tensor] = {}
    for chunk in itertools.product(*(zip(own, begins(own), strict=True) for own in spans)):
        view = local
        for dim, ((begin, end), at) in enumerate(chunk):
            view = view.narrow(dim, at, end - begin)
        views[tuple(begin for (begin, _), _ in chunk)] = view
    return views


def full_tensor(tensor: DTensor) -> Tensor:
    """The whole tensor, bit for bit, on every process of its mesh; every process of the mesh must call it.

    Raises:
        ValueError: the shape of the local tensor does not match its placements.
    """
    if not cut_more_than_once(tensor):
        return tensor.full_tensor()
    # Along the sharding axes, one process has each element and the others have 0: the sum of the bytes is exact.
    whole = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.to_local().device)
    for offsets, view in chunks_of(tensor).items():
        _cut(whole, offsets, view.shape).copy_(view)
    data = whole.view(-1).view(torch.uint8)
    for axis, placement in enumerate(tensor.placements):
        if not placement.is_replicate():
            dist.all_reduce(data, group=tensor.device_mesh.get_group(axis))
    return whole


def fill(tensor: DTensor, whole: Tensor) -> None:
    """Copy this process's shard from ``whole``; no communication.

    Raises:
        ValueError: the shape of the local tensor does not match its placements.
    """
    for offsets, view in chunks_of(tensor).items():
        view.copy_(_cut(whole, offsets, view.shape))


def _cut(whole: Tensor, offsets: Offsets, shape: Sequence[int]) -> Tensor:
    for dim, (begin, size) in enumerate(zip(offsets, shape, strict=True)):
        whole = whole.narrow(dim, begin, size)
    return whole


def cuts_of(placements: Sequence[Placement]) -> tuple[Cut | None, ...]:
    """The cuts that the axes of a mesh make; None for those that replicate.

    Raises:
        ValueError: a sum over processes is pending.
    """
    if any(placement.is_partial() for placement in placements):
        raise ValueError(f"has a pending sum ({placements}), which is no shard of anything; redistribute it first")
    return tuple(
        None if placement.is_replicate() else Cut(int(cast(Any, placement).dim), _split_factor(placement))
        for placement in placements
    )


def _split_factor(placement: Placement) -> int:
    # torch's class is private, and a subclass of Shard up to 2.9 only; it has had this attribute since 2.6.
    return int(getattr(placement, "split_factor", 1))
