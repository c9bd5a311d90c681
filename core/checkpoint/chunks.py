"""Which chunks of a tensor a process holds, whatever class the tensor is of."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from ..base.errors import CheckpointError
from ..torch_compat.torch_private import TO_COPY, is_fake, wrapper_subclass

# The indices of a tensor's dimension that a process holds, from size, mesh and cuts alone; see ``dtensor_chunks``.


Span = tuple[int, int]
"""Begin and end of consecutive indices."""


class Cut(NamedTuple):
    """The cut that an axis of a mesh makes: torch's ``Shard(dim)``, or its ``_StridedShard(dim, split_factor)``."""

    dim: int
    split_factor: int = 1


def own_spans(
    size: int, dim: int, cuts: Sequence[Cut | None], mesh: Sequence[int], coordinates: Sequence[int]
) -> list[Span]:
    """The indices along one dimension that a process holds.

    Args:
        size: the dimension's size.
        dim: its number.
        cuts: of each axis of the mesh; None: the axis replicates.
        mesh: sizes of the axes.
        coordinates: of the process in the mesh.
    """
    spans = [(0, size)] if size else []
    for axis, split_factor in order_of_cuts(dim, cuts, mesh):
        spans = dealt(spans, split_factor, mesh[axis], coordinates[axis])
    return spans


def order_of_cuts(dim: int, cuts: Sequence[Cut | None], mesh: Sequence[int]) -> list[tuple[int, int]]:
    """(axis, number of matrices that it found) for the axes that cut a dimension, in the order in which they did."""
    order: list[tuple[int, int]] = []
    for axis in reversed(range(len(cuts))):
        cut = cuts[axis]
        if cut is None or cut.dim != dim:
            continue
        counts = [math.prod(mesh[other] for other, _ in order[:n]) for n in range(len(order) + 1)]
        if cut.split_factor in counts:
            order.insert(counts.index(cut.split_factor), (axis, 1))
        else:
            order.insert(0, (axis, cut.split_factor))
    return order


def dealt(spans: list[Span], split_factor: int, count: int, index: int) -> list[Span]:
    """Divide the indices into ``split_factor`` spans, each of them into ``count``; return number ``index`` of each."""
    length = sum(end - begin for begin, end in spans)
    found: list[Span] = []
    for number in range(split_factor):
        begin, end = share(length, split_factor, number)
        first, last = share(end - begin, count, index)
        for span in _between(spans, begin + first, begin + last):
            if found and found[-1][1] == span[0]:
                found[-1] = (found[-1][0], span[1])
            else:
                found.append(span)
    return found


def share(length: int, count: int, index: int) -> Span:
    """Begin and end of number ``index`` of ``count``, as torch.chunk divides: all have one size, but the last ones."""
    size = -(-length // count)
    return min(index * size, length), min((index + 1) * size, length)


def _between(spans: list[Span], first: int, last: int) -> list[Span]:
    """The indices at the positions [first, last) of ``spans``."""
    found = []
    for (begin, end), at in zip(spans, begins(spans), strict=True):
        low, high = max(first, at), min(last, at + end - begin)
        if low < high:
            found.append((begin + low - at, begin + high - at))
    return found


def begins(spans: list[Span]) -> list[int]:
    """Begin of each span in the local tensor."""
    return list(itertools.accumulate((end - begin for begin, end in spans[:-1]), initial=0))[: len(spans)]


# Chunks of a DTensor that a process holds: several for strided shards (``_StridedShard``).
#
# torch uses ``_StridedShard(dim, split_factor)`` for two reasons:
#
# - Tensor parallelism shards a dimension first and FSDP divides its shards, but the mesh has FSDP's axis first. The split
#   factor is then the number of shards that the axes to the right have made.
# - A projection holds several matrices (gate and up; query, key and value), and every process gets a shard of each. The
#   split factor is then the number of matrices.
#
# torch's ``full_tensor()`` and checkpoint planners are wrong for some of these layouts: for the second kind under
# FSDP along the same dimension, and for uneven sizes. ``full_tensor()`` hangs where FSDP leaves a process without a
# shard. The functions here shard in the order in which the axes did.


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


# A range of a flattened tensor as rectangular chunks.


Chunk = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a chunk."""


def chunks_of_range(shape: Sequence[int], start: int, end: int) -> Iterator[Chunk]:
    """Yield the flat range [start, end) of a row-major tensor as chunks, in memory order.

    There are at most 2n - 1 in n dimensions, each contiguous in memory. An empty range has none.
    """
    if start >= end:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), end // row  # the whole rows are [first, last)
    if first > last:  # all inside one row
        yield from _in_row(shape, last, start - last * row, end - last * row)
        return
    if start % row:
        yield from _in_row(shape, first - 1, start % row, row)
    if first < last:
        yield (first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])
    if end % row:
        yield from _in_row(shape, last, 0, end % row)


def _in_row(shape: Sequence[int], row: int, start: int, end: int) -> Iterator[Chunk]:
    for offsets, sizes in chunks_of_range(shape[1:], start, end):
        yield (row, *offsets), (1, *sizes)


# FlatShard: a shard that is a range of a flattened tensor; checkpoints save and load it like other shards.


class Ranges(NamedTuple):
    """The ranges of one flattened tensor that all processes hold.

    Attributes:
        ends: begin and end, by rank.
        device: on which processes work together; ranges may be kept in the host's memory.
    """

    ends: tuple[Span, ...]
    device: torch.device


class FlatShard(Tensor):
    """This process's flat range [start, start + n) of a logical tensor; other processes hold the other ranges.

    It has the logical tensor's shape and shares the memory of ``local``, so that loading into it fills ``local``. It
    can be copied, cast, cloned and interpolated, each process on its own range; for other operations use ``to_local``
    or ``full_tensor``.

    Args:
        local: the values of the range, one-dimensional and contiguous; may be empty.
        shape: shape of the logical tensor.
        start: begin of the range in the flattened logical tensor.
        ranges: of all processes, for who needs to know what the others hold.
    """

    _local: Tensor
    start: int
    ranges: Ranges | None

    @staticmethod
    def __new__(cls, local: Tensor, shape: Sequence[int], start: int, ranges: Ranges | None = None) -> FlatShard:
        """See the class for the arguments."""
        if local.dim() != 1 or not local.is_contiguous():
            raise ValueError(f"local: must be one-dimensional and contiguous, has shape {tuple(local.shape)}")
        if start < 0 or start + local.numel() > math.prod(shape):
            raise ValueError(f"start: {start} to {start + local.numel()} lies outside of shape {tuple(shape)}")
        shard: FlatShard = wrapper_subclass(cls, shape, local)
        shard._local, shard.start, shard.ranges = local.detach(), start, ranges
        return shard

    def to_local(self) -> Tensor:
        """The values of this process, one-dimensional; they share memory."""
        return self._local

    def full_tensor(self) -> Tensor:
        """The whole tensor, from the disjoint ranges of all processes; a collective."""
        whole = self._local.new_zeros(math.prod(self.shape))
        whole[self.start : self.start + self._local.numel()] = self._local
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(whole)
        return whole.view(self.shape)

    def chunks(self) -> dict[tuple[int, ...], Tensor]:
        """This process's range as chunks: offsets to a view."""
        if self.numel() == 0:  # a checkpoint needs the shape of a tensor without elements too
            return {(0,) * self.dim(): self._local.view(self.shape)}
        found: dict[tuple[int, ...], Tensor] = {}
        position = 0
        for offsets, sizes in chunks_of_range(tuple(self.shape), self.start, self.start + self._local.numel()):
            length = math.prod(sizes)
            found[offsets] = self._local.narrow(0, position, length).view(sizes)
            position += length
        return found

    def _like(self, local: Tensor) -> FlatShard:
        return FlatShard(local, self.shape, self.start)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override,unused-ignore]
        """The range, shape, dtype and device, without values."""
        end = self.start + self._local.numel()
        return f"FlatShard([{self.start}:{end}] of {tuple(self.shape)}, {self.dtype}, {self.device})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override,unused-ignore]
        cls, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the few element-wise operations on the local values."""
        if func is _aten.is_pinned.default:
            return func(cast(FlatShard, args[0])._local, *args[1:], **(kwargs or {}))
        if func not in _ELEMENTWISE:
            raise NotImplementedError(f"{func}: not for a slice of a tensor, use to_local() or full_tensor()")
        shards = [arg for arg in args if isinstance(arg, FlatShard)]
        shard = shards[0]
        if any(other.start != shard.start or other.shape != shard.shape for other in shards[1:]) or any(
            isinstance(arg, Tensor) and arg.dim() > 0 and not isinstance(arg, FlatShard) for arg in args
        ):
            raise ValueError(f"{func}: both must be the same slice of tensors of one shape")
        result = func(*(arg._local if isinstance(arg, FlatShard) else arg for arg in args), **(kwargs or {}))
        # An in-place operation must return the object on which it was called.
        return shard if result is shard._local else shard._like(result)


_aten = torch.ops.aten
_ELEMENTWISE = frozenset(
    {
        _aten.detach.default,
        _aten.alias.default,
        _aten.clone.default,
        TO_COPY,
        _aten.copy_.default,
        _aten.empty_like.default,
        _aten.zeros_like.default,
        _aten.zero_.default,
        _aten.fill_.Scalar,
        _aten.lerp_.Scalar,
    }
)


ORDINARY = (Tensor, nn.Parameter)


def is_ordinary(tensor: Tensor) -> bool:
    """Whether the tensor is whole on this process, and no class of its own says what it holds."""
    return type(tensor) in ORDINARY or is_fake(tensor)


@torch.no_grad()  # outside of it, to_local() records an autograd graph, which not every class can before torch 2.7
def is_cut_by_rule(tensor: Tensor) -> bool:
    """Whether the tensor is a DTensor whose local tensor is what its placements say."""
    return isinstance(tensor, DTensor) and is_ordinary(tensor.to_local())


@torch.no_grad()  # as above
def held_chunks(key: str, tensor: Tensor) -> dict[Offsets, Tensor]:
    """Offsets in the whole tensor to a view of this process's memory, for every chunk that it holds.

    Args:
        key: the tensor's key, for messages.
        tensor: an ordinary tensor, a FlatShard, a DTensor, or one of a class that torch.distributed.checkpoint knows.

    Raises:
        CheckpointError: a sum over processes is pending, or the local tensor does not fit the placements.
    """
    if isinstance(tensor, FlatShard):
        return tensor.chunks()
    if is_ordinary(tensor):
        return {(0,) * tensor.dim(): tensor.detach()}
    if not is_cut_by_rule(tensor):
        return _of_own_class(key, tensor)
    try:
        return chunks_of(cast(DTensor, tensor))
    except ValueError as error:
        raise CheckpointError(f"{key}: {error}") from error


def _of_own_class(key: str, tensor: Tensor) -> dict[Offsets, Tensor]:
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan

    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner({key: tensor})
    found = {}
    for item in create_default_local_save_plan({key: tensor}, False).items:
        chunk = planner.resolve_data(item)
        assert isinstance(chunk, Tensor)
        assert item.tensor_data is not None
        found[tuple(item.tensor_data.chunk.offsets)] = chunk.detach()
    return found
