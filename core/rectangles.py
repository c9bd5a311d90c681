"""Which rectangles of the whole a process has of a DTensor: several, where a dimension is dealt out in strides.

torch describes such dimensions by ``_StridedShard(dim, split_factor)``, for two reasons:

- Tensor parallelism cuts a dimension first and FSDP cuts the pieces, while a mesh names FSDP's axis first. The split factor
  is then the number of pieces that the axes to the right have cut.
- A projection holds several matrices (gate and up; query, key and value), of each of which every process gets its part.
  The split factor is then the number of matrices.

torch's own ``full_tensor()`` and checkpoint planners are wrong for some of these layouts: the second kind under FSDP along
the same dimension, and uneven sizes; where FSDP leaves a process without any part, ``full_tensor()`` hangs. Here the cuts
are carried out in the order in which they were made.
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

Run = tuple[int, int]
"""Begin and end of neighbouring indices."""
Offsets = tuple[int, ...]


def cut_more_than_once(tensor: DTensor) -> bool:
    """Whether several axes of the mesh shard it, or one does in strides: where torch cannot be relied on."""
    return sum(_split_factor(placement) for placement in tensor.placements if not placement.is_replicate()) > 1


def rectangles(tensor: DTensor) -> dict[Offsets, Tensor]:
    """Offsets in the whole tensor to rectangle, as views of the local part; together they are all of it.

    Raises:
        ValueError: the local part has another shape than these placements give.
    """
    local = cast(DTensor, tensor.detach()).to_local()
    coordinates = tensor.device_mesh.get_coordinate()
    if coordinates is None:  # this process is none of the mesh
        return {}
    runs = [
        _own_runs(size, dim, tensor.placements, tuple(tensor.device_mesh.shape), coordinates)
        for dim, size in enumerate(tensor.shape)
    ]
    if tensor.numel() == 0:  # even a tensor without elements has to be known by its shape
        return {(0,) * tensor.dim(): local.new_empty(tensor.shape)}
    shape = tuple(sum(end - begin for begin, end in own) for own in runs)
    if math.prod(shape) == local.numel() == 0:  # FSDP gives it any shape
        return {}
    if tuple(local.shape) != shape:
        raise ValueError(f"has a part of shape {tuple(local.shape)} where {tensor.placements} gives {shape}")
    views: dict[Offsets, Tensor] = {}
    for box in itertools.product(*(zip(own, _begins(own), strict=True) for own in runs)):
        view = local
        for dim, ((begin, end), at) in enumerate(box):
            view = view.narrow(dim, at, end - begin)
        views[tuple(begin for (begin, _), _ in box)] = view
    return views


def full_tensor(tensor: DTensor) -> Tensor:
    """The whole tensor on every process of its mesh, which all have to call it; bit for bit.

    Raises:
        ValueError: the local part has another shape than its placements give.
    """
    if not cut_more_than_once(tensor):
        return tensor.full_tensor()
    # Each element comes from one process along the axes that shard, and is summed as bytes, which changes none of them.
    whole = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.to_local().device)
    for offsets, view in rectangles(tensor).items():
        _cut(whole, offsets, view.shape).copy_(view)
    data = whole.view(-1).view(torch.uint8)
    for axis, placement in enumerate(tensor.placements):
        if not placement.is_replicate():
            dist.all_reduce(data, group=tensor.device_mesh.get_group(axis))
    return whole


def fill(tensor: DTensor, whole: Tensor) -> None:
    """Copy this process's part out of the whole tensor, which every process has.

    Raises:
        ValueError: the local part has another shape than its placements give.
    """
    for offsets, view in rectangles(tensor).items():
        view.copy_(_cut(whole, offsets, view.shape))


def _cut(whole: Tensor, offsets: Offsets, shape: Sequence[int]) -> Tensor:
    for dim, (begin, size) in enumerate(zip(offsets, shape, strict=True)):
        whole = whole.narrow(dim, begin, size)
    return whole


def _split_factor(placement: Placement) -> int:
    # torch's class is private, and a Shard up to 2.9 only; what it is asked for here it has had since 2.6.
    return int(getattr(placement, "split_factor", 1))


def _own_runs(
    size: int, dim: int, placements: Sequence[Placement], mesh: Sequence[int], coordinates: Sequence[int]
) -> list[Run]:
    """The indices along one dimension that are this process's."""
    runs = [(0, size)] if size else []
    for axis, split_factor in _cuts(dim, placements, mesh):
        runs = _dealt(runs, split_factor, mesh[axis], coordinates[axis])
    return runs


def _cuts(dim: int, placements: Sequence[Placement], mesh: Sequence[int]) -> list[tuple[int, int]]:
    """The axes that cut a dimension, in the order in which they did, and into how many matrices each found it divided."""
    order: list[tuple[int, int]] = []
    for axis in reversed(range(len(placements))):
        placement = placements[axis]
        if getattr(placement, "dim", None) != dim:
            continue
        factor = _split_factor(placement)
        pieces = [math.prod(mesh[other] for other, _ in order[:n]) for n in range(len(order) + 1)]
        if factor in pieces:
            order.insert(pieces.index(factor), (axis, 1))
        else:
            order.insert(0, (axis, factor))
    return order


def _dealt(runs: list[Run], split_factor: int, count: int, index: int) -> list[Run]:
    """Part ``index`` of ``count`` of each of ``split_factor`` pieces of the indices."""
    length = sum(end - begin for begin, end in runs)
    found: list[Run] = []
    for number in range(split_factor):
        begin, end = _chunk(length, split_factor, number)
        first, last = _chunk(end - begin, count, index)
        for run in _between(runs, begin + first, begin + last):
            if found and found[-1][1] == run[0]:
                found[-1] = (found[-1][0], run[1])
            else:
                found.append(run)
    return found


def _chunk(length: int, count: int, index: int) -> Run:
    """As torch.chunk does: all of one size but the last ones."""
    size = -(-length // count)
    return min(index * size, length), min((index + 1) * size, length)


def _between(runs: list[Run], first: int, last: int) -> list[Run]:
    """The indices at the places [first, last) of ``runs``."""
    found = []
    for (begin, end), at in zip(runs, _begins(runs), strict=True):
        low, high = max(first, at), min(last, at + end - begin)
        if low < high:
            found.append((begin + low - at, begin + high - at))
    return found


def _begins(runs: list[Run]) -> list[int]:
    """Where each run begins in the local part."""
    return list(itertools.accumulate((end - begin for begin, end in runs[:-1]), initial=0))[: len(runs)]
