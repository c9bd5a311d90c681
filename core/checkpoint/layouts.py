"""Layouts: which process holds which chunks of a tensor, as rules whose length does not grow with the processes.

Ranks in a layout count from the first process that the tensor is on, so that many tensors share a layout.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import pydantic
from numpy.typing import NDArray

from ..shard_spans import Cut, Span, own_spans
from .flat_ranges import chunks_of_range
from .untrusted import check_disjoint

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a chunk."""
MAX_RANKS = 100_000
_MAX_SPANS = 2**22
_CUT = re.compile(r"S(\d{1,3})(?:/(\d{1,9}))?")


class Strict(pydantic.BaseModel):
    """Part of an index: fields that it does not know are errors."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


class MeshLayout(Strict):
    """A mesh of processes, each of whose axes cuts a dimension, as a DTensor does; without axes, one process has all."""

    mesh: tuple[int, ...]
    """Sizes of the axes."""
    strides: tuple[int, ...] | None = None
    """How much the rank grows along each axis."""
    ranks: tuple[int, ...] | None = None
    """The ranks, the last axis first, if they are not evenly spaced."""
    cuts: tuple[str, ...]
    """What each axis cuts: ``S0`` is dimension 0, ``S0/3`` dimension 0 of three tensors that are joined along it."""

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> MeshLayout:
        count = math.prod(self.mesh)
        if len(self.cuts) != len(self.mesh) or any(size < 1 for size in self.mesh) or count > MAX_RANKS:
            raise ValueError("its mesh is not valid")
        if (self.strides is None) == (self.ranks is None) or len(self.strides or self.mesh) != len(self.mesh):
            raise ValueError("its mesh needs either strides or ranks")
        largest = MAX_RANKS if self.strides is None else max((abs(s) for s in self.strides), default=0)
        if largest > MAX_RANKS or (self.ranks is not None and len(self.ranks) != count):
            raise ValueError("its ranks do not fill the mesh")
        if any(_CUT.fullmatch(cut) is None for cut in self.cuts):
            raise ValueError("it has a cut that no axis makes")
        if count * math.prod(cut.split_factor for cut in self.as_cuts()) > _MAX_SPANS:
            raise ValueError("it cuts into more pieces than any tensor")
        if self.ranks is not None and any(abs(rank) > MAX_RANKS for rank in self.ranks):
            raise ValueError("its mesh has a rank that cannot be")
        if len(set(_ranks(self).tolist())) != count:
            raise ValueError("its mesh has a rank twice")
        return self

    def as_cuts(self) -> tuple[Cut, ...]:
        """The cuts of the axes."""
        found = [_CUT.fullmatch(cut) for cut in self.cuts]
        return tuple(Cut(int(match[1]), int(match[2] or 1)) for match in found if match is not None)

    def every_rank(self) -> NDArray[np.int64]:
        """The ranks of all processes, the last axis first."""
        return _ranks(self)

    def check(self, shape: Sequence[int]) -> None:
        """Raise ValueError if no tensor of this shape can have the layout."""
        if any(cut.dim >= len(shape) or cut.split_factor < 1 for cut in self.as_cuts()):
            raise ValueError("its layout cuts a dimension that it does not have")

    def sizes(self, shape: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The ranks of all processes, and how many elements each of them holds."""
        return _ranks(self), _numel(self, tuple(shape))

    def chunks_of(self, shape: Sequence[int], rank: int) -> Iterator[Box]:
        """Yield the chunks that a process holds; none if it is not in the mesh."""
        position = _positions(self).get(rank)
        if position is None:
            return
        if not self.mesh:  # also a tensor without elements is a chunk
            yield (0,) * len(shape), tuple(shape)
            return
        coordinates = [int(coordinate) for coordinate in np.unravel_index(position, self.mesh)]
        spans = [_dimension(self, dim, size).at(coordinates) for dim, size in enumerate(shape)]
        for chunk in itertools.product(*spans):
            yield tuple(begin for begin, _ in chunk), tuple(end - begin for begin, end in chunk)

    def chunks(self, shape: Sequence[int]) -> Iterator[tuple[int, Box]]:
        """Yield all chunks, each with its rank."""
        return ((rank, box) for rank in _ranks(self).tolist() for box in self.chunks_of(shape, rank))

    def count(self, shape: Sequence[int]) -> int:
        """The number of all chunks."""
        # Each axis cuts one dimension, so that every span of one meets every span of the others in one process.
        return math.prod(len(_dimension(self, dim, size).begins) for dim, size in enumerate(shape)) if self.mesh else 1

    def overlapping(self, shape: Sequence[int], box: Box) -> Iterator[tuple[int, Box]]:
        """Yield the rank and the box of every chunk that shares elements with ``box``; others are not looked at."""
        dimensions = [_dimension(self, dim, size) for dim, size in enumerate(shape)]
        wanted = zip(dimensions, *box, strict=True)
        for chunk in itertools.product(*(dimension.within(offset, size) for dimension, offset, size in wanted)):
            coordinates = [0] * len(self.mesh)
            for dimension, (_, at) in zip(dimensions, chunk, strict=True):
                for axis, coordinate in zip(dimension.axes, at, strict=True):
                    coordinates[axis] = coordinate
            position = int(np.ravel_multi_index(coordinates, self.mesh)) if self.mesh else 0
            spans = [span for span, _ in chunk]
            yield (
                int(_ranks(self)[position]),
                (tuple(begin for begin, _ in spans), tuple(end - begin for begin, end in spans)),
            )


class FlatLayout(Strict):
    """Consecutive ranges of the flattened tensor, one for each process, as a FlatShard has."""

    runs: tuple[tuple[int, int, int], ...]
    """(rank, count, length): the next ``count`` ranks from this one hold ``length`` elements each."""

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> FlatLayout:
        if any(count < 1 or length < 1 or abs(rank) > MAX_RANKS for rank, count, length in self.runs):
            raise ValueError("it has a range without elements")
        if sum(count for _, count, _ in self.runs) > MAX_RANKS:
            raise ValueError("it has more ranges than processes")
        return self

    def check(self, shape: Sequence[int]) -> None:
        """Raise ValueError if the ranges are not all there."""
        if sum(count * length for _, count, length in self.runs) != math.prod(shape):
            raise ValueError("its ranges are not all there")

    def _ranges(self) -> Iterator[tuple[int, int, int]]:
        """Yield (rank, begin, end) of every range."""
        begin = 0
        for first, count, length in self.runs:
            for rank in range(first, first + count):
                yield rank, begin, begin + length
                begin += length

    def sizes(self, shape: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """See MeshLayout."""
        ranks = [np.arange(rank, rank + count, dtype=np.int64) for rank, count, _ in self.runs]
        lengths = [np.full(count, length, dtype=np.int64) for _, count, length in self.runs]
        none = np.zeros(0, dtype=np.int64)
        return np.concatenate([none, *ranks]), np.concatenate([none, *lengths])

    def chunks_of(self, shape: Sequence[int], rank: int) -> Iterator[Box]:
        """See MeshLayout."""
        begin = 0
        for first, count, length in self.runs:
            if first <= rank < first + count:
                start = begin + (rank - first) * length
                yield from chunks_of_range(shape, start, start + length)
            begin += count * length

    def chunks(self, shape: Sequence[int]) -> Iterator[tuple[int, Box]]:
        """See MeshLayout."""
        return ((rank, box) for rank, begin, end in self._ranges() for box in chunks_of_range(shape, begin, end))

    def count(self, shape: Sequence[int]) -> int:
        """See MeshLayout."""
        return sum(1 for _ in self.chunks(shape))

    def overlapping(self, shape: Sequence[int], box: Box) -> Iterator[tuple[int, Box]]:
        """See MeshLayout."""
        if 0 in box[1]:
            return
        steps = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        low = sum(offset * step for offset, step in zip(box[0], steps, strict=True))
        high = sum((offset + size - 1) * step for offset, size, step in zip(*box, steps, strict=True)) + 1
        begin = 0
        for first, count, length in self.runs:
            for number in range(max(0, (low - begin) // length), min(count, -(-(high - begin) // length))):
                start = begin + number * length
                for chunk in chunks_of_range(shape, start, start + length):
                    if overlap(chunk, box) is not None:
                        yield first + number, chunk
            begin += count * length


class BoxLayout(Strict):
    """A list of chunks, for what follows from no rule; it grows with the processes."""

    boxes: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]
    """(rank, offsets, sizes) of each chunk."""

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> BoxLayout:
        if any(abs(rank) > MAX_RANKS for rank, _, _ in self.boxes):
            raise ValueError("it has a chunk on a process that cannot be")
        return self

    def check(self, shape: Sequence[int]) -> None:
        """Raise ValueError if the chunks do not make up the tensor."""
        check_boxes([(offsets, sizes) for _, offsets, sizes in self.boxes], shape)

    def sizes(self, shape: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """See MeshLayout."""
        found: dict[int, int] = {}
        for rank, _, sizes in self.boxes:
            found[rank] = found.get(rank, 0) + math.prod(sizes)
        return np.array(list(found), dtype=np.int64), np.array(list(found.values()), dtype=np.int64)

    def chunks_of(self, shape: Sequence[int], rank: int) -> Iterator[Box]:
        """See MeshLayout."""
        return ((offsets, sizes) for owner, offsets, sizes in self.boxes if owner == rank)

    def chunks(self, shape: Sequence[int]) -> Iterator[tuple[int, Box]]:
        """See MeshLayout."""
        return ((rank, (offsets, sizes)) for rank, offsets, sizes in self.boxes)

    def count(self, shape: Sequence[int]) -> int:
        """See MeshLayout."""
        return len(self.boxes)

    def overlapping(self, shape: Sequence[int], box: Box) -> Iterator[tuple[int, Box]]:
        """See MeshLayout."""
        for rank, *chunk in self.boxes:
            if overlap((chunk[0], chunk[1]), box) is not None:
                yield rank, (chunk[0], chunk[1])


def _kind(layout: Any) -> str | None:
    fields = layout if isinstance(layout, dict) else vars(layout) if isinstance(layout, Strict) else ()
    return next((kind for kind in ("mesh", "runs", "boxes") if kind in fields), None)


Layout = Annotated[
    Annotated[MeshLayout, pydantic.Tag("mesh")]
    | Annotated[FlatLayout, pydantic.Tag("runs")]
    | Annotated[BoxLayout, pydantic.Tag("boxes")],
    pydantic.Discriminator(_kind),
]


def check_boxes(boxes: Sequence[Box], shape: Sequence[int]) -> None:
    """Raise ValueError if chunks do not make up a tensor of this shape, each element once."""
    for offsets, sizes in boxes:
        ends = zip(offsets, sizes, shape, strict=True)
        if any(offset < 0 or length < 0 or offset + length > size for offset, length, size in ends):
            raise ValueError("a chunk lies outside of it")
    # Elements that no chunk covers would stay uninitialised.
    if sum(math.prod(sizes) for _, sizes in boxes) < math.prod(shape):
        raise ValueError("its chunks are not all there")
    check_disjoint(boxes)


def overlap(a: Box, b: Box) -> Box | None:
    """The box of the elements that both have; None if there are none. Tensors without dimensions have one element."""
    spans = [(max(x, y), min(x + m, y + n)) for x, m, y, n in zip(*a, *b, strict=True)]
    if any(begin >= end for begin, end in spans):
        return None
    return tuple(begin for begin, _ in spans), tuple(end - begin for begin, end in spans)


def even_flat(numel: int, count: int) -> FlatLayout:
    """The ranges of a flattened tensor that ``count`` processes share evenly, as ZeRO-3 does; the last ones hold less."""
    length = -(-numel // count)
    full, rest = divmod(numel, length) if length else (0, 0)
    return FlatLayout(runs=((0, full, length),) * bool(full) + ((full, 1, rest),) * bool(rest))


# What many tensors have in common is computed once


@dataclass(frozen=True)
class _Dimension:
    """One dimension of a tensor: the spans that each process holds of it."""

    axes: tuple[int, ...]
    """The axes of the mesh that cut it."""
    spans: dict[tuple[int, ...], list[Span]]
    """By the coordinates on these axes."""
    begins: list[int]
    ends: list[int]
    """Of all spans, in their order, which is that of ``owners``."""
    owners: list[tuple[int, ...]]

    def at(self, coordinates: Sequence[int]) -> list[Span]:
        """The spans of the process with these coordinates in the whole mesh."""
        return self.spans[tuple(coordinates[axis] for axis in self.axes)]

    def within(self, offset: int, size: int) -> list[tuple[Span, tuple[int, ...]]]:
        """The spans that share indices with [offset, offset + size), each with the coordinates of its processes."""
        low, high = bisect_right(self.ends, offset), bisect_left(self.begins, offset + size)
        return [((self.begins[n], self.ends[n]), self.owners[n]) for n in range(low, high)]


@functools.lru_cache(maxsize=512)
def _dimension(layout: MeshLayout, dim: int, size: int) -> _Dimension:
    cuts, mesh = layout.as_cuts(), layout.mesh
    axes = tuple(axis for axis, cut in enumerate(cuts) if cut.dim == dim)
    found: dict[tuple[int, ...], list[Span]] = {}
    for at in itertools.product(*(range(mesh[axis]) for axis in axes)):
        found[at] = own_spans(size, 0, [Cut(0, cuts[a].split_factor) for a in axes], [mesh[a] for a in axes], at)
    order = sorted((begin, end, at) for at, spans in found.items() for begin, end in spans)
    begins, ends, owners = (list(column) for column in zip(*order, strict=True)) if order else ([], [], [])
    return _Dimension(axes, found, begins, ends, owners)


@functools.lru_cache(maxsize=512)
def _numel(layout: MeshLayout, shape: tuple[int, ...]) -> NDArray[np.int64]:
    total: NDArray[Any] = np.ones(layout.mesh, dtype=np.int64)
    for dim, size in enumerate(shape):
        dimension = _dimension(layout, dim, size)
        lengths = [sum(end - begin for begin, end in spans) for spans in dimension.spans.values()]
        sizes = [n if axis in dimension.axes else 1 for axis, n in enumerate(layout.mesh)]
        total = total * np.array(lengths, dtype=np.int64).reshape(sizes)
    return total.reshape(-1)


@functools.lru_cache(maxsize=512)
def _ranks(layout: MeshLayout) -> NDArray[np.int64]:
    if layout.ranks is not None:
        return np.array(layout.ranks, dtype=np.int64)
    found: NDArray[Any] = np.zeros((), dtype=np.int64)
    for size, stride in zip(layout.mesh, layout.strides or (), strict=True):
        found = found[..., None] + np.arange(size, dtype=np.int64) * stride
    return found.reshape(-1)


@functools.lru_cache(maxsize=512)
def _positions(layout: MeshLayout) -> dict[int, int]:
    return {rank: position for position, rank in enumerate(_ranks(layout).tolist())}


WHOLE = MeshLayout(mesh=(), strides=(), cuts=())
"""One process has the whole tensor."""
