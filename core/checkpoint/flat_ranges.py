"""A range of a flattened tensor as rectangular chunks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

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
