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
from typing import cast

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

Span = tuple[int, int]
"""Begin and end of consecutive indices."""
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
    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(
            f"has a pending sum ({tensor.placements}), which is no shard of anything; redistribute it first"
        )
    local = cast(DTensor, tensor.detach()).to_local()
    coordinates = tensor.device_mesh.get_coordinate()
    if coordinates is None:  # this process is not in the mesh
        return {}
    spans = [
        _own_spans(size, dim, tensor.placements, tuple(tensor.device_mesh.shape), coordinates)
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
    for chunk in itertools.product(*(zip(own, _begins(own), strict=True) for own in spans)):
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


def _split_factor(placement: Placement) -> int:
    # torch's class is private, and a subclass of Shard up to 2.9 only; it has had this attribute since 2.6.
    return int(getattr(placement, "split_factor", 1))


def _own_spans(
    size: int, dim: int, placements: Sequence[Placement], mesh: Sequence[int], coordinates: Sequence[int]
) -> list[Span]:
    """The indices along one dimension that this process holds."""
    spans = [(0, size)] if size else []
    for axis, split_factor in _cuts(dim, placements, mesh):
        spans = _dealt(spans, split_factor, mesh[axis], coordinates[axis])
    return spans


def _cuts(dim: int, placements: Sequence[Placement], mesh: Sequence[int]) -> list[tuple[int, int]]:
    """(axis, number of matrices that it found) for the axes that shard a dimension, in the order in which they did."""
    order: list[tuple[int, int]] = []
    for axis in reversed(range(len(placements))):
        placement = placements[axis]
        if getattr(placement, "dim", None) != dim:
            continue
        factor = _split_factor(placement)
        counts = [math.prod(mesh[other] for other, _ in order[:n]) for n in range(len(order) + 1)]
        if factor in counts:
            order.insert(counts.index(factor), (axis, 1))
        else:
            order.insert(0, (axis, factor))
    return order


def _dealt(spans: list[Span], split_factor: int, count: int, index: int) -> list[Span]:
    """Divide the indices into ``split_factor`` spans, each of them into ``count``; return number ``index`` of each."""
    length = sum(end - begin for begin, end in spans)
    found: list[Span] = []
    for number in range(split_factor):
        begin, end = _share(length, split_factor, number)
        first, last = _share(end - begin, count, index)
        for span in _between(spans, begin + first, begin + last):
            if found and found[-1][1] == span[0]:
                found[-1] = (found[-1][0], span[1])
            else:
                found.append(span)
    return found


def _share(length: int, count: int, index: int) -> Span:
    """Begin and end of number ``index`` of ``count``, as torch.chunk divides: all have one size, but the last ones."""
    size = -(-length // count)
    return min(index * size, length), min((index + 1) * size, length)


def _between(spans: list[Span], first: int, last: int) -> list[Span]:
    """The indices at the positions [first, last) of ``spans``."""
    found = []
    for (begin, end), at in zip(spans, _begins(spans), strict=True):
        low, high = max(first, at), min(last, at + end - begin)
        if low < high:
            found.append((begin + low - at, begin + high - at))
    return found


def _begins(spans: list[Span]) -> list[int]:
    """Begin of each span in the local tensor."""
    return list(itertools.accumulate((end - begin for begin, end in spans[:-1]), initial=0))[: len(spans)]
