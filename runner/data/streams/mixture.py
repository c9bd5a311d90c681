"""Mixture: samples of several sources, by weights."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
from torch.utils.data import Dataset, IterableDataset

from ....core.base.config import PositiveInt
from ....core.base.errors import ConfigError, counted
from ....core.base.registry import DATASETS
from ....core.random.generators import nth_seed
from ....core.random.permutation import Indices, hashed
from ..dataset_wrappers import build_dataset
from ..samplers import tell_epoch
from ..sources.file_source import print_of_parts
from ..stream_orders import Order, order_of, source_seed

# Which source comes at which position of a mixture, and how many of its samples come before: computed from the
# position.


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
        hashes = hashed((keys + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + self._seeds[source])
        # Odd multiples of half a grain: no time is that of a whole sample, where rounding would decide.
        parts = ((hashes >> np.uint64(48)).astype(np.float64) * 2 + 1) / (2 * _GRAIN)
        return (keys.astype(np.float64) + parts) / self.shares[source]


_KEPT_ORDERS = 4


@DATASETS.register_module()
class Mixture(Dataset[Any]):
    """Samples of several sources, each as often as its weight says, at every moment of the training.

    Which source comes at a position, and how many of its samples come before, follows from the position alone. A source's
    samples come in its own passes: all once, in an order of their own, then all again. A small source with a large weight
    is in its third pass when a large one is in its first.

    A pass of the mixture has as many samples as all sources together, or ``num_samples``; the next one goes on where it
    ended. Without weights every sample of every source comes exactly once in a pass. A mixture with weights or
    ``num_samples`` may be a source of another one, but not part of other datasets, which know one pass only.

    Args:
        sources: datasets with a length, or ``dict(type=...)``.
        weights: one number above 0 per source; only their relation counts. None: the lengths of the sources.
        num_samples: samples of a pass, after which a loop by epochs ends an epoch.

    Raises:
        ConfigError: a weight is 0, negative or not a number, there are not as many weights as sources, or a source is empty.

    Example:
        train_dataloader = dict(
            batch_size=8,
            dataset=dict(
                type="Mixture",
                sources=[dict(type="JsonlFiles", paths="a.jsonl"), dict(type="JsonlFiles", paths="b.jsonl")],
                weights=[0.7, 0.3],
            ),
        )
    """

    follows_order: ClassVar[bool] = True
    """Its samples have meaning only in its own order: samplers that are not flextrain's are refused."""
    inner_datasets: ClassVar[str] = "sources"
    """The argument in which the class takes other datasets, whose configurations are checked with its own. A list is several
    datasets if the name is a plural, as here, and otherwise a dataset itself."""

    def __init__(
        self,
        sources: list[Any] | tuple[Any, ...],
        weights: list[float] | tuple[float, ...] | None = None,
        *,
        num_samples: PositiveInt | None = None,
        where: str = "",
    ) -> None:
        where = where or "Mixture"
        if not sources:
            raise ConfigError(f"{where}.sources: {sources!r} is not allowed, give a list of at least one dataset")
        _check_weights(weights, len(sources), where)
        self.sources = [build_dataset(source, f"{where}.sources[{i}]") for i, source in enumerate(sources)]
        for number, source in enumerate(self.sources):
            at = f"{where}.sources[{number}]"
            if isinstance(source, IterableDataset) or not hasattr(source, "__len__"):
                raise ConfigError(f"{at}: {type(source).__name__} has no length, give a dataset with one")
            if not len(source):
                raise ConfigError(f"{at}: {type(source).__name__} is empty")
        self._sizes = [len(source) for source in self.sources]
        self.weights = [float(weight) for weight in weights or self._sizes]
        if num_samples is not None and num_samples < 1:
            raise ConfigError(f"{where}.num_samples: {num_samples} is not allowed, give 1 or more")
        self._length = num_samples or sum(self._sizes)
        parts_are_whole = all(getattr(source, "in_one_pass", True) for source in self.sources)
        self.in_one_pass = weights is None and self._length == sum(self._sizes) and parts_are_whole
        """Whether every pass has each sample once. Other datasets read one pass only, and refuse a mixture without that."""
        prints = [getattr(source, "fingerprint", len(source)) for source in self.sources]
        self.fingerprint = print_of_parts("Mixture", self._length, [*prints, *self.weights])
        """Changes with the fingerprints of the sources, the weights and ``num_samples``."""
        self._own: Order | None = None

    def __len__(self) -> int:
        return self._length

    def order_of_pass(self, seed: int, number: int, shuffle: bool) -> Order:
        """Return the order of pass ``number``; see ``Order``. Its indices are at and beyond the length."""
        return _MixtureOrder(self.sources, self.weights, self._length, seed, number, shuffle)

    def __getitem__(self, index: int) -> Any:
        """Return the sample at position ``index`` of an unshuffled pass, or that of an index from ``order_of_pass``."""
        source, own = self.find(index)
        return self.sources[source][own]

    def find(self, index: int) -> tuple[int, int]:
        """Return the number of the source that an index means, and the index in that source."""
        if index < self._length:
            self._own = self._own or self.order_of_pass(0, 0, False)
            index = int(self._own[np.array([range(self._length)[index]])][0])
        own, source = divmod(index - self._length, len(self.sources))
        return source, own

    def counts(self, position: int, seed: int = 0) -> list[int]:
        """Return how many samples of each source come before a position, counted over all passes of the mixture.

        Args:
            position: number of samples that were trained on, over all processes.
            seed: the sampler's seed, which is the run's unless it was given one; counts differ by at most one with it.
        """
        return MixtureSchedule(self.weights, seed).counts(position)

    def set_epoch(self, epoch: int) -> None:
        """Tell the sources the number of the mixture's epoch."""
        for source in self.sources:
            tell_epoch(source, epoch)


class _MixtureOrder:
    """The order of one pass of a mixture."""

    def __init__(
        self, sources: Sequence[Any], weights: Sequence[float], length: int, seed: int, number: int, shuffle: bool
    ) -> None:
        self._sources, self._length, self._seed, self._shuffle = sources, length, seed, shuffle
        self._begin = number * length
        self._schedule = MixtureSchedule(weights, seed)
        self._orders: OrderedDict[tuple[int, int], Order] = OrderedDict()

    def __getitem__(self, positions: Indices) -> Indices:
        found = np.empty_like(positions)
        if not len(positions):
            return found
        # What repeats the beginning of a pass is not next to the rest.
        for begin, end in _spans(positions):
            own = positions[begin:end] + self._begin
            first = int(own.min())
            sources, numbers = self._schedule.at(first, int(own.max()) + 1)
            sources, numbers = sources[own - first], numbers[own - first]
            for source in np.unique(sources).tolist():
                here = sources == source
                indices = self._of_source(source, numbers[here])
                found[begin:end][here] = self._length + indices * len(self._sources) + source
        return found

    def _of_source(self, source: int, numbers: Indices) -> Indices:
        """The indices in a source of its samples ``numbers``, counted over all its passes."""
        passes, at = np.divmod(numbers, len(self._sources[source]))
        found = np.empty_like(numbers)
        for number in np.unique(passes).tolist():
            here = passes == number
            found[here] = self._order(source, number)[at[here]]
        return found

    def _order(self, source: int, number: int) -> Order:
        key = (source, number)
        if key not in self._orders:
            if len(self._orders) >= _KEPT_ORDERS * len(self._sources):
                self._orders.popitem(last=False)
            seed = source_seed(self._seed, source)
            self._orders[key] = order_of(self._sources[source], seed, number, self._shuffle)
        return self._orders[key]


def _spans(positions: Indices) -> list[tuple[int, int]]:
    """Spans of an array in which positions increase."""
    cuts = [0, *(np.flatnonzero(np.diff(positions) <= 0) + 1).tolist(), len(positions)]
    return list(pairwise(cuts))


def _check_weights(weights: Any, sources: int, where: str) -> None:
    if weights is None:
        return
    if not isinstance(weights, (list, tuple)) or len(weights) != sources:
        given = counted(len(weights), "weight") if isinstance(weights, (list, tuple)) else repr(weights)
        raise ConfigError(f"{where}.weights: {given} for {counted(sources, 'source')}, give one number for each")
    for number, weight in enumerate(weights):
        is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
        if not is_number or not math.isfinite(weight) or weight <= 0:
            advice = "; leave the source out to use none of it" if weight == 0 else ""
            raise ConfigError(f"{where}.weights[{number}]: {weight!r} is not allowed, give a number above 0{advice}")
