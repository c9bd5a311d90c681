"""ExactEpochs: epochs in which each sample counts exactly once, on any number of processes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...core.errors import ConfigError
from .dataloader_reader import Feed
from .samplers import DefaultSampler


@dataclass(frozen=True)
class Counted:
    """How many samples count of each micro-batch of an update, where not all micro-batches have equally many.

    Attributes:
        own: of the micro-batches of this process. 0 is a filler: a repeated sample, because other processes have one
            micro-batch more, and the model may run collectives.
        total: of all micro-batches of all data shards.
        shards: number of data shards.
        has_filler: whether some process has a filler.
    """

    own: tuple[int, ...]
    total: int
    shards: int
    has_filler: bool

    @property
    def factors(self) -> list[float]:
        """Factor of the mean loss of each micro-batch, so that the mean over the shards is the mean over the samples."""
        return [number * self.shards / self.total for number in self.own]

    @property
    def ends_with_filler(self) -> bool:
        """Whether the last micro-batch of this process is a filler; no other one is."""
        return self.own[-1] == 0


class ExactEpochs:
    """Divides epochs of ``DefaultSampler(round_up=False)`` into micro-batches, as many on every process.

    Samples are dealt in turn, so processes differ by one sample at most, and only in an epoch's last update. If the one
    sample more is the first of a micro-batch, the other processes have a filler there. All of this follows from numbers
    that each process has, so nothing is communicated.

    Args:
        sampler: the sampler of a training loader.
        batch_size: samples of a micro-batch of a process.
        drop_last: leave out the last micro-batches if they are not full on every process.
    """

    def __init__(self, sampler: DefaultSampler, batch_size: int, drop_last: bool) -> None:
        self._sampler, self._batch_size, self._drops = sampler, batch_size, drop_last
        self.now: Counted | None = None
        """What counts of the window given last; None: all of its micro-batches, equally."""

    @classmethod
    def of(cls, feed: Feed | None, shards: int) -> ExactEpochs | None:
        """Return that of the data which ``feed`` reads, whose sampler is told; None if samples are repeated.

        Raises:
            ConfigError: the processes would have different numbers of batches, and it is unknown how many.
        """
        sampler = None if feed is None else feed.sampler
        if feed is None or not isinstance(sampler, DefaultSampler) or sampler.round_up or sampler.count != shards:
            return None
        if not feed.by_position:
            if sampler.num_samples % shards:
                kind = type(sampler) if feed.has_own_order else type(feed.loader.batch_sampler)
                raise ConfigError(
                    f"train_dataloader.sampler.round_up: False gives {sampler.num_samples} samples unevenly to {shards} processes, "
                    f"and {kind.__name__} has an order of its own, whose batches cannot be counted before; leave round_up out"
                )
            return None
        drop_last = bool(getattr(feed.loader.batch_sampler, "drop_last", False))
        feed.exact = feed.batch_size, drop_last
        return cls(sampler, feed.batch_size, drop_last)

    def batches_from(self, position: int) -> int:
        """Return the micro-batches of every process in an epoch that continues at the global position."""
        samples = max(0, self._sampler.num_samples - position)
        whole, rest = divmod(samples, self._sampler.count * self._batch_size)
        return whole + (rest > 0 and not self._drops)

    def counted(self, position: int, accumulate: int) -> Counted | None:
        """Return what counts in the update at a position; None if all of its micro-batches have equally many samples.

        Args:
            position: of its first sample, over all processes.
            accumulate: micro-batches of an update.
        """
        left, shards, size = self._sampler.num_samples - position, self._sampler.count, self._batch_size
        if self._drops or left <= 0 or left >= shards * size * accumulate:
            return None
        most = math.ceil(left / shards)
        batches = math.ceil(most / size)
        if left % shards == 0 and (batches == 1 or most % size == 0):
            return None
        samples = math.ceil((left - self._sampler.index) / shards)
        own = tuple(min(size, max(0, samples - number * size)) for number in range(batches))
        return Counted(own, left, shards, has_filler=left % shards > 0 and (most - 1) % size == 0)

    def windows(self, own: Iterator[list[Any]], start: int, last: int, counted: Counted | None) -> Iterator[list[Any]]:
        """Yield the windows of an epoch; while the last one is trained on, ``now`` is what counts of it.

        Args:
            own: the windows.
            start: number of the first one.
            last: number of the epoch's last one.
            counted: what counts of that.
        """
        for number, window in enumerate(own, start):
            self.now = counted if number == last else None
            yield window
        self.now = None
