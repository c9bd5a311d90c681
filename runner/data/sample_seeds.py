"""Random numbers of data: what is drawn for a sample follows from the run's seed, the epoch and the sample's place in it.

Whichever process or worker reads a sample, in a batch of whatever size, before or after a run was resumed: its augmentation is
the same. A dataset that never draws is only watched, which costs a few microseconds per batch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import repeat
from operator import getitem
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, StackDataset, Subset, get_worker_info

from ...core.generators import Watch, nth_seed, seed_generators
from .epochs import tell_epoch


class Turn(NamedTuple):
    """What is read next, and its place."""

    seed: int
    """Of the epoch."""
    epoch: int
    position: int
    """Of the first sample in the epoch, over all processes."""
    stride: int
    """From one sample to the next."""
    indices: Any
    """The batch's; a single one where there are no batches."""


class SeededDataset(Dataset[Any]):
    """A dataset of batches: ``dataset[turn]`` is read and collated, with the generators seeded for every sample of its own.

    Python's, NumPy's and torch's generator on the CPU are seeded; they are left as they were found. A dataset with
    ``__getitems__`` is seeded once for a batch, as the collating function is.

    Args:
        dataset: the user's.
        collate: makes a batch of a list of samples.
        in_batches: whether a turn has a list of indices; otherwise it has one, and ``collate`` gets its sample.
    """

    def __init__(self, dataset: Any, collate: Callable[[Any], Any], in_batches: bool) -> None:
        self.dataset, self.collate, self.in_batches = dataset, collate, in_batches
        self.epoch: int | None = None
        self._at_once = in_batches and _reads_at_once(dataset)
        self._watch: Watch | None = None
        # Whether reading draws random numbers; None until a batch has been read.
        self._draws: bool | None = None

    def __getitem__(self, turn: Turn) -> Any:
        if turn.epoch != self.epoch:
            tell_epoch(self.dataset, turn.epoch)  # to the copy of a worker that was there in the last epoch
            self.epoch = turn.epoch
        self._watch = self._watch or Watch()
        with self._watch:
            if self._draws is False:
                batch = self._read(turn.indices)
                if not self._watch.moved():
                    return batch
                self._draws = True  # from here on; of this batch nothing is kept
            return self._draw(turn, self._watch)

    def _read(self, indices: Any) -> Any:
        if self._at_once:
            return self.collate(self.dataset.__getitems__(indices))
        dataset = self.dataset
        return self.collate(list(map(getitem, repeat(dataset), indices)) if self.in_batches else dataset[indices])

    def _draw(self, turn: Turn, watch: Watch) -> Any:
        """Read with seeds; of the first batch that is read, find out whether they were needed."""
        if self._at_once:
            samples = self._seeded(turn, 2 * turn.position, watch, self.dataset.__getitems__, turn.indices)
        elif self.in_batches:
            places = range(turn.position, turn.position + turn.stride * len(turn.indices), turn.stride)
            read = self.dataset.__getitem__
            samples = [
                self._seeded(turn, 2 * place, watch, read, index)
                for place, index in zip(places, turn.indices, strict=True)
            ]
        else:
            samples = self._seeded(turn, 2 * turn.position, watch, self.dataset.__getitem__, turn.indices)
        batch = self._seeded(turn, 2 * turn.position + 1, watch, self.collate, samples)
        self._draws = bool(self._draws)
        return batch

    def _seeded(self, turn: Turn, number: int, watch: Watch, read: Callable[[Any], Any], what: Any) -> Any:
        seed_generators(nth_seed(turn.seed, number))
        if self._draws is not None:
            return read(what)
        watch.mark()
        found = read(what)
        if watch.moved():
            self._draws = True
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_watch": None}  # of this process


class SeededStream(IterableDataset[Any]):
    """A stream as worker processes read it: what they draw begins anew with the epoch, also in workers that stay."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        # Shared with the workers.
        self._begins: Tensor = torch.zeros(2, dtype=torch.int64, device="cpu").share_memory_()  # type: ignore[no-untyped-call]

    def begin(self, seed: int, epoch: int) -> None:
        """Choose the epoch that comes next, and the seed that workers draw their own from."""
        drawn = torch.empty((), dtype=torch.int64, device="cpu").random_(generator=torch.Generator().manual_seed(seed))
        self._begins[0], self._begins[1] = drawn, epoch
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        base, epoch = self._begins.tolist()
        if epoch != self.epoch:
            tell_epoch(self.dataset, epoch)
            self.epoch = epoch
        info = get_worker_info()
        worker = info.id if info else 0
        # The seeds that torch gives to new workers.
        random.seed(base + worker)
        np.random.seed(np.random.SeedSequence([worker, base % 2**32, base >> 32, 0]).generate_state(4))
        torch.manual_seed(base + worker)
        return iter(self.dataset)


class WorkerInit:
    """What a worker process begins with: the user's dataset where users look for it, then their own function."""

    def __init__(self, function: Callable[[int], None] | None) -> None:
        self.function = function

    def __call__(self, worker: int) -> None:
        info: Any = get_worker_info()
        object.__setattr__(info, "dataset", info.dataset.dataset)  # torch lets nobody assign to it
        if self.function is not None:
            self.function(worker)


def order_seed(seed: int, epoch: int) -> int:
    """The seed of an epoch's order where that is not flextrain's; the same in all versions, whose checkpoints go on with it."""
    return seed + 1_000_003 * (epoch + 1)


def as_read(batch: Any) -> Any:
    """The batch, which SeededDataset has collated."""
    return batch


def _reads_at_once(dataset: Any) -> bool:
    """Whether a dataset reads several samples by a function of its own; torch's wrappers do if what they wrap does."""
    own = getattr(type(dataset), "__getitems__", None)
    if own is Subset.__getitems__:
        return _reads_at_once(dataset.dataset)
    if own is StackDataset.__getitems__:
        parts = dataset.datasets
        return any(map(_reads_at_once, parts.values() if isinstance(parts, dict) else parts))
    return callable(getattr(dataset, "__getitems__", None))
