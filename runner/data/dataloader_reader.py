"""Feed: reads a DataLoader from any position of an epoch, with random numbers that depend only on that position."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice, repeat
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, IterDataPipe, Sampler

from ...core.generators import RandomStream, epoch_seed, forget_spare_normal, nth_seed
from ...core.torch_private import end_kept_workers
from .sample_seeds import SeededDataset, SeededStream, Turn, WorkerInit, as_read, order_seed
from .samplers import DefaultSampler, Repeatable, ShardedSampler, follows_span
from .user_loaders import is_divided, resampled

_END = object()


class Feed:
    """The batches of a DataLoader, from any position of an epoch on.

    Reading neither changes nor uses the RNG state of the process.

    Args:
        loader: a DataLoader from the user, or built from a configuration.
        shard: (index, count) of the data shard that this process reads.
    """

    def __init__(self, loader: DataLoader[Any], shard: tuple[int, int] = (0, 1)) -> None:
        self.loader, self.shard = loader, shard
        self.is_stream = isinstance(loader.dataset, IterableDataset)
        self.repeatable: Repeatable | None = None
        """The order of a sampler that is not flextrain's; it is repeated from the beginning of the epoch."""
        batches = loader.batch_sampler
        # A custom batch sampler holds the sampler itself, and the loader only a placeholder.
        self.sampler: Any = getattr(batches, "sampler", loader.sampler)
        self.batch_size: int = getattr(batches, "batch_size", None) or 1
        self.exact: tuple[int, bool] | None = None
        """(batch size, drop_last) if each sample of an epoch counts once, see ExactEpochs."""
        self._is_divided = is_divided(loader)
        self.has_own_data = isinstance(self.sampler, ShardedSampler) and self.sampler.count == 1 < shard[1]
        """True if every process has a dataset of its own, which no sampler splits."""
        if self.is_stream:
            self._read: DataLoader[Any] = self._stream()
            return
        own_batches = type(batches) not in (BatchSampler, type(None))
        self.has_own_order = not follows_span(self.sampler)
        """True if the sampler follows no positions."""
        if own_batches or self.has_own_order:
            self.repeatable = Repeatable(loader.sampler if batches is None else batches)
        self._turns = _Turns()
        self._dataset = SeededDataset(loader.dataset, loader.collate_fn, in_batches=batches is not None)
        self._read = resampled(
            loader,
            dataset=self._dataset,
            sampler=self._turns,
            batch_sampler=None,
            batch_size=None,
            collate_fn=as_read,
            worker_init_fn=WorkerInit(loader.worker_init_fn) if loader.num_workers else None,
        )

    @property
    def by_position(self) -> bool:
        """True if positions count samples over all processes, False if they count this process's batches."""
        return not self.is_stream and self.repeatable is None

    def batches(
        self, seed: int, epoch: int, start: int = 0, stop: int | None = None, diff_shard_seed: bool = False
    ) -> Iterator[Any]:
        """Yield the batches of an epoch.

        Args:
            seed: seed of everything that is drawn.
            epoch: number of the epoch; another number gives other random numbers.
            start: first position to read: samples over all processes with flextrain's samplers, otherwise batches.
            stop: position to end before, in the same unit; None: the end of the epoch.
            diff_shard_seed: draw the order of samplers that are not flextrain's from another seed in every data shard.
        """
        order = order_seed(seed, epoch)
        own_seed = order + self.shard[0]
        if diff_shard_seed and not self._is_divided:
            order = own_seed
        generator: Any = self._read.generator  # draws the workers' seeds
        generator.manual_seed(own_seed)
        if self.is_stream:
            return self._part_of_stream(order, order if self._is_divided else own_seed, epoch, start, stop)
        # A generator inside a dataset starts from its worker's seed, which must differ when an epoch is continued.
        generator.manual_seed(nth_seed(own_seed, start) >> 1)
        self._dataset.epoch = epoch
        if self.repeatable is not None:
            self.repeatable.position(order, start, stop)
        else:
            self.sampler.set_span(start, stop)
            if isinstance(self.sampler, DefaultSampler):  # which evaluation may use too
                self.sampler.batches = self.exact
        turns = self._turns_from(epoch_seed(seed, epoch), epoch, start)
        if not self._read.num_workers and not self._read.pin_memory:
            return map(self._dataset.__getitem__, turns)  # does the same as the DataLoader, some microseconds faster
        self._turns.turns = turns
        return self._from_workers() if self._read.num_workers else iter(self._read)

    def close(self) -> None:
        """End workers that would be kept for the next epoch."""
        end_kept_workers(self._read)

    def _turns_from(self, seed: int, epoch: int, start: int) -> Iterator[Turn]:
        if self.repeatable is not None:
            index, shards = self.shard
            return (
                Turn(seed, epoch, position * shards + index, shards, item)
                for position, item in self.repeatable.positions()
            )
        order: Any = self.sampler if self.loader.batch_sampler is None else self.loader.batch_sampler
        stride, first = self.sampler.count, start + self.sampler.index
        if self.has_own_data:
            stride, first = self.shard[1], start * self.shard[1] + self.shard[0]
        positions = count(first, stride * self.batch_size)
        return map(Turn, repeat(seed), repeat(epoch), positions, repeat(stride), order)

    def _from_workers(self) -> Iterator[Any]:
        for batch in self._read:
            forget_spare_normal()  # like a batch that is read in this process
            yield batch

    # Streams

    def _stream(self) -> DataLoader[Any]:
        if not self.loader.num_workers or isinstance(self.loader.dataset, IterDataPipe):
            return resampled(self.loader)
        return resampled(
            self.loader,
            dataset=SeededStream(self.loader.dataset),
            worker_init_fn=WorkerInit(self.loader.worker_init_fn),
        )

    def _part_of_stream(self, seed: int, own_seed: int, epoch: int, start: int, stop: int | None) -> Iterator[Any]:
        """Yield the batches from number ``start`` to ``stop``; a stream has to be read from its beginning.

        Its random numbers start at the beginning of the stream, in this process or in each worker.
        """
        if isinstance(self._read.dataset, SeededStream):
            self._read.dataset.begin(own_seed, epoch)
        if self._read.num_workers:
            yield from islice(self._from_workers(), start, stop)
            return
        draws = RandomStream(seed)
        with draws:
            batches = self._batches_of_stream()
        for number in count() if stop is None else range(stop):
            with draws:
                batch = next(batches, _END)
            if batch is _END:
                return
            if number >= start:
                yield batch

    def _batches_of_stream(self) -> Iterator[Any]:
        loader: Any = self.loader
        if loader.pin_memory or isinstance(loader.dataset, IterDataPipe):
            return iter(self._read)
        samples = iter(loader.dataset)
        if loader.batch_size is None:
            return map(loader.collate_fn, samples)
        groups = iter(lambda: list(islice(samples, loader.batch_size)), [])
        if loader.drop_last:
            groups = (group for group in groups if len(group) == loader.batch_size)
        return map(loader.collate_fn, groups)


class _Turns(Sampler[Turn]):
    """A sampler that yields the turns it was given last.

    It has no reference to Feed: workers of a loader in a reference cycle end only after a wait of five seconds each.
    """

    def __init__(self) -> None:
        self.turns: Iterator[Turn] = iter(())

    def __iter__(self) -> Iterator[Turn]:
        return self.turns
