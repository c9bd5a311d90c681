"""DocumentIndex: finds the documents that a span of tokens is made of, with documents in stored or shuffled order."""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from ....core.generators import nth_seed

GROUP = 1024
"""Documents in a group: the cumulative lengths are kept by group, and shuffled documents stay in theirs."""
_KEPT = 32
_CHUNK = 2**20

Numbers = np.ndarray[Any, np.dtype[np.int64]]


class Lengths(Protocol):
    """Lengths of documents: an array, or any object whose slices are arrays."""

    def __len__(self) -> int:
        """Return the number of documents."""
        ...

    def __getitem__(self, span: slice, /) -> Numbers:
        """Return the lengths of a span of documents."""
        ...


def ends_of_groups(lengths: Lengths, extra: int = 0) -> Numbers:
    """Return the number of tokens up to the end of each group, int64, reading all lengths once.

    Args:
        lengths: tokens of each document.
        extra: tokens that are added to each document.
    """
    sums = [np.zeros(0, np.int64)]
    for at in range(0, len(lengths), _CHUNK):
        chunk = np.asarray(lengths[at : at + _CHUNK], np.int64) + extra
        sums.append(np.add.reduceat(chunk, np.arange(0, len(chunk), GROUP)))
    return np.cumsum(np.concatenate(sums))


class DocumentIndex:
    """Documents one after the other as one sequence of tokens; finds what a span of it is made of.

    A look-up reads the ends of groups by bisection, and the lengths of the one or two groups that it needs: the time does
    not depend on the number of documents.

    Args:
        lengths: tokens of each document.
        group_ends: result of ``ends_of_groups`` with the same ``extra``.
        extra: tokens that are added to each document.
        seed: seed of the order in a group; None: the documents stay as they are stored.
    """

    def __init__(self, lengths: Lengths, group_ends: Numbers, extra: int = 0, seed: int | None = None) -> None:
        self.lengths, self.group_ends, self.extra, self.seed = lengths, group_ends, extra, seed
        self._kept: OrderedDict[tuple[int, int], tuple[list[int], list[int]]] = OrderedDict()

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return int(self.group_ends[-1]) if len(self.group_ends) else 0

    def documents(self, start: int, stop: int, number: int) -> Iterator[tuple[int, int, int]]:
        """Yield (document, first token, token after the last) for each document in a span of tokens.

        Args:
            start: first token, of those of all documents one after the other.
            stop: token after the last, at most ``num_tokens``.
            number: the pass, which determines the shuffled order.
        """
        group = bisect.bisect_right(self.group_ends, start)
        while start < stop:
            begin = int(self.group_ends[group - 1]) if group else 0
            documents, ends = self._group(group, number)
            at = bisect.bisect_right(ends, start - begin)
            while start < stop and at < len(ends):
                first = begin + (ends[at - 1] if at else 0)
                last = begin + ends[at]
                if last > start:  # not an empty document
                    yield documents[at], start - first, min(stop, last) - first
                    start = min(stop, last)
                at += 1
            group += 1

    def _group(self, group: int, number: int) -> tuple[list[int], list[int]]:
        """The documents of a group in their order, and the tokens of the group up to the end of each."""
        key = (group, number if self.seed is not None else 0)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        lengths = np.asarray(self.lengths[group * GROUP : (group + 1) * GROUP], np.int64) + self.extra
        order = np.arange(len(lengths))
        if self.seed is not None:
            order = _shuffled(len(lengths), nth_seed(nth_seed(self.seed % 2**64, number), group))
        if len(self._kept) >= _KEPT:
            self._kept.popitem(last=False)
        self._kept[key] = found = (order + group * GROUP).tolist(), np.cumsum(lengths[order]).tolist()
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": OrderedDict()}


def _shuffled(size: int, seed: int) -> Any:
    """A random order of a few numbers: sorted by their hashes, which are all different."""
    keys = np.arange(size, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    keys ^= keys >> np.uint64(30)
    keys *= np.uint64(0xBF58476D1CE4E5B9)
    keys ^= keys >> np.uint64(27)
    keys *= np.uint64(0x94D049BB133111EB)
    keys ^= keys >> np.uint64(31)
    return np.argsort(keys)
