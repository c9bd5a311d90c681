"""Orders of a pass over a source: which sample comes at which position, computed without a permutation in memory."""

from __future__ import annotations

from collections.abc import Sized
from typing import Protocol

import numpy as np

from ...core.random.generators import nth_seed
from ...core.random.permutation import Indices, Shuffled, Straight
from .samplers import own_order

MIXED = 4
"""Blocks whose samples are shuffled together."""


class Order(Protocol):
    """The order of one pass: ``order[positions]`` computes the indices of an array of positions, int64 both.

    ``dataset.order_of_pass(seed, number, shuffle)`` returns the order of pass ``number``, which samplers follow. The indices
    may be at or beyond ``len(dataset)``, if the dataset's ``__getitem__`` knows such numbers.
    """

    def __getitem__(self, positions: Indices, /) -> Indices:
        """Return the index at each position."""
        ...


def default_order(size: int, seed: int, number: int, shuffle: bool) -> Order:
    """The order of pass ``number`` over ``size`` samples: any sample anywhere, or as they stand."""
    return Shuffled(size, seed, number) if shuffle else Straight()


def order_of(dataset: Sized, seed: int, number: int, shuffle: bool) -> Order:
    """The dataset's own order of pass ``number``, or the default."""
    own = own_order(dataset)
    return own(seed, number, shuffle) if own else default_order(len(dataset), seed, number, shuffle)


def source_seed(seed: int, number: int) -> int:
    """The seed of one of several sources, so that those of equal length are shuffled differently."""
    return nth_seed(seed % 2**64, number)


class LocalOrder:
    """Blocks of neighbours in random order, and their samples mixed with those of the three blocks beside them then.

    Whoever reads in this order needs at most four blocks at a time. The memory is that of two numbers per block.

    Args:
        ends: index after the last sample of each block, increasing, int64.
        seed, number: different ones give unrelated orders.
    """

    def __init__(self, ends: Indices, seed: int, number: int) -> None:
        sizes = np.diff(ends, prepend=0)
        blocks = Shuffled(len(ends), seed, number)[np.arange(len(ends))] if len(ends) > 1 else np.zeros(1, np.int64)
        self._first = (ends - sizes)[blocks]
        self._ends = np.cumsum(sizes[blocks])
        last = np.minimum(np.arange(MIXED - 1, len(ends) + MIXED - 1, MIXED), len(ends) - 1)
        self._group_ends = self._ends[last]
        self._seeds = seed, number

    def __getitem__(self, positions: Indices) -> Indices:
        groups = np.searchsorted(self._group_ends, positions, side="right")
        mixed = np.empty_like(positions)
        for group in np.unique(groups).tolist():
            begin = int(self._group_ends[group - 1]) if group else 0
            size = int(self._group_ends[group]) - begin
            own = groups == group
            mixed[own] = begin + Shuffled(size, *self._seeds, group, MIXED)[positions[own] - begin]
        blocks = np.searchsorted(self._ends, mixed, side="right")
        before = np.where(blocks > 0, self._ends[blocks - 1], 0)
        found: Indices = self._first[blocks] + mixed - before
        return found
