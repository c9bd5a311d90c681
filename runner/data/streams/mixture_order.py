"""Which source comes at which position of a mixture, and how many of its samples come before: computed from the position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ....core.generators import nth_seed

Numbers = np.ndarray[Any, np.dtype[np.int64]]
_GRAIN = 2**16
_LONGEST = 2**16


class MixtureSchedule:
    """The order of the sources in a mixture, from any position on.

    Sample ``k`` of a source with weight ``w`` has the time ``(k + u) / w``, where ``u`` is a hash from 0 to 1 of seed, source
    and ``k``; the mixture is all samples in the order of their times. So at every time each source has had its share to
    less than one sample, no pattern repeats that could fall in step with the processes, and what comes at a position
    is found from the number of each source's samples up to a time shortly before.

    Args:
        weights: one per source, above 0; only their relation counts.
        seed: seed of the hashes.
    """

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        total = sum(weights)
        self.shares = [weight / total for weight in weights]
        self._seeds = [np.uint64(nth_seed(seed % 2**64, number)) for number in range(len(weights))]

    def at(self, start: int, stop: int) -> tuple[Numbers, Numbers]:
        """Return, for positions ``start`` to ``stop``, the source and how many of its samples come before; int64 both."""
        if stop - start > _LONGEST:
            parts = [self.at(at, min(at + _LONGEST, stop)) for at in range(start, stop, _LONGEST)]
            return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])
        slack = len(self.shares) + 2
        begin, end = float(max(0, start - slack)), float(stop + slack)
        first = [self._before(number, begin) for number in range(len(self.shares))]
        counts = [self._before(number, end) - at for number, at in enumerate(first)]
        sources = np.repeat(np.arange(len(counts)), counts)
        numbers = np.concatenate([at + np.arange(count) for at, count in zip(first, counts, strict=True)])
        times = np.concatenate(
            [self._times(number, at, count) for number, (at, count) in enumerate(zip(first, counts, strict=True))]
        )
        skipped = start - sum(first)
        order = np.argsort(times, kind="stable")[skipped : skipped + stop - start]
        assert skipped >= 0
        assert len(order) == stop - start
        return sources[order], numbers[order]

    def counts(self, position: int) -> list[int]:
        """Return how many samples of each source come before a position."""
        slack = len(self.shares) + 2
        begin = max(0, position - slack)
        first = [self._before(number, float(begin)) for number in range(len(self.shares))]
        sources, _ = self.at(sum(first), position)
        return [
            count + int(more) for count, more in zip(first, np.bincount(sources, minlength=len(first)), strict=True)
        ]

    def _before(self, source: int, time: float) -> int:
        """The number of samples of a source before a time."""
        about = max(0, int(time * self.shares[source]) - 2)
        return about + int((self._times(source, about, 5) < time).sum())

    def _times(self, source: int, first: int, count: int) -> Any:
        """The times of samples ``first`` to ``first + count`` of a source."""
        keys = np.arange(first, first + count, dtype=np.uint64)
        hashes = (keys + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + self._seeds[source]
        hashes ^= hashes >> np.uint64(30)
        hashes *= np.uint64(0xBF58476D1CE4E5B9)
        hashes ^= hashes >> np.uint64(27)
        hashes *= np.uint64(0x94D049BB133111EB)
        # Odd multiples of half a grain: no time is that of a whole sample, where rounding would decide.
        parts = ((hashes >> np.uint64(48)).astype(np.float64) * 2 + 1) / (2 * _GRAIN)
        return (keys.astype(np.float64) + parts) / self.shares[source]
