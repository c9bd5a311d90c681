"""The indices of a tensor's dimension that a process holds, from size, mesh and cuts alone; see ``dtensor_chunks``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

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
