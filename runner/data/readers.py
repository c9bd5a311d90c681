"""Readers of dataloaders: from any position of an epoch, with random numbers that depend on the sample."""

from __future__ import annotations

import copy
import hashlib
import logging
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import count, islice, repeat
from operator import is_
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, IterDataPipe, Sampler

from ...core.base.errors import CheckpointError, ConfigError, DataError, counted
from ...core.base.events import heartbeat
from ...core.base.json_values import pack, unpack
from ...core.base.snapshot import stands_for_something_outside
from ...core.random.generators import RandomStream, epoch_seed, forget_spare_normal, nth_seed
from ...core.torch_compat.torch_private import INITIALIZED, end_kept_workers, version_of
from .sample_seeds import CollateOfStream, SeededDataset, SeededStream, Turn, WorkerInit, as_read, order_seed
from .samplers import (
    DefaultSampler,
    Repeatable,
    ShardedSampler,
    chain_of,
    follows_span,
    held,
    samplers_in,
    seed_own_generators,
    takes_epoch,
    tell_epoch,
)
from .streams.divided_streams import original
from .user_loaders import (
    is_divided,
    keeps_position,
    name_of,
    resampled,
    sampler_of,
    say_how_it_resumes,
    why_not_by_state,
)

_END = object()


_logger = logging.getLogger("flextrain")
_MOST_HELD, _MOST_ITEMS = 2_000, 100
_LARGEST_ARRAY = 2**20  # bytes; they are copied in every epoch
_VALUES = (str, bytes, int, float, bool)


class _Counted(NamedTuple):
    """A tensor, and how often it was changed in place."""

    tensor: Tensor
    version: int


class _Content(NamedTuple):
    """What a list, dict or array holds, which may be changed in place."""

    kind: type
    items: Any

    def __call__(self) -> Any:
        """Another one that holds the same."""
        half = len(self.items) // 2
        return (
            dict(zip(self.items[:half], self.items[half:], strict=True)) if self.kind is dict else copy.copy(self.items)
        )


def _noted(one: Any) -> Any:
    if isinstance(one, Tensor):
        return _Counted(one, 0 if one.is_inference() else version_of(one))
    if type(one) is np.ndarray and one.nbytes <= _LARGEST_ARRAY:
        return _Content(np.ndarray, one.copy())
    return (
        _Content(type(one), [*one, *one.values()] if type(one) is dict else [*one])
        if type(one) in (list, dict)
        else one
    )


def _held_by(**roots: Any) -> dict[str, Any]:
    """What objects hold, by the way to it, ``dataset.transform.size``: attributes, and items of lists and dicts, some of long ones."""
    held: dict[str, Any] = {}
    pending, samples, seen = list(roots.items()), list[tuple[str, Any]](), set()
    while (pending or samples) and len(held) < _MOST_HELD:
        own_kind = pending or samples  # samples, of long lists, last: they may hold more than all others
        path, one = own_kind.pop(0)
        held[path] = _noted(one)
        if (
            id(one) in seen
            or isinstance(one, (Tensor, random.Random))
            or stands_for_something_outside(one)
            or _is_ours(one)
        ):
            continue
        seen.add(id(one))
        if isinstance(one, (list, tuple, dict)):
            items = one.items() if isinstance(one, dict) else enumerate(one)
            some = islice(items, 0, None, len(one) // _MOST_ITEMS + 1)
            found = samples if len(one) > _MOST_ITEMS else own_kind
            found += [(f"{path}[{key!r}]", item) for key, item in some]
        elif isinstance(own := getattr(one, "__dict__", None), dict):
            own_kind += [(f"{path}.{name}", value) for name, value in own.items()]
    return held


def _is_ours(one: Any) -> bool:
    """Whether an object is of this library, such as the runner, which changes all the time."""
    return type(one).__module__.partition(".")[0] == __name__.partition(".")[0] and not isinstance(one, Dataset)


def _changed(before: dict[str, Any], now: dict[str, Any], epoch: int) -> list[str]:
    """The names of what has changed, but for what ``set_epoch`` changes, which workers that are kept are told."""
    found, equivalents, told_of = [], dict[str, dict[str, Any]](), set[str]()
    is_cut = max(len(before), len(now)) >= _MOST_HELD
    for name in [name for name in before if name in now] if is_cut else {**before, **now}:
        one, other = before.get(name, _END), now.get(name, _END)
        if _is_same(one, other) or name.startswith(tuple(f"{each}{sign}" for each in told_of for sign in ".[")):
            continue
        path, _, key = name.rpartition(".")
        if takes_epoch(now.get(path)):
            if path not in equivalents:
                equivalent = copy.copy(now[path])
                for own in [own for own in vars(equivalent) if f"{path}.{own}" in before]:
                    was = before[f"{path}.{own}"]
                    vars(equivalent)[own] = was() if isinstance(was, _Content) else was
                tell_epoch(equivalent, epoch)
                equivalents[path] = {own: _noted(value) for own, value in vars(equivalent).items()}
            if key in equivalents[path] and not _is_same(equivalents[path][key], one):
                told_of.add(name)
                continue
        found.append(name)
    return found


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, _Counted) and isinstance(other, _Counted):
        return one.tensor is other.tensor and one.version == other.version
    if isinstance(one, _Content) and isinstance(other, _Content):
        if one.kind is other.kind is np.ndarray:
            return bool(one.items.dtype == other.items.dtype) and one.items.tobytes() == other.items.tobytes()
        if one.kind is not other.kind or len(one.items) != len(other.items):
            return False
        return all(map(is_, one.items, other.items)) or all(map(_is_same, one.items, other.items))
    return one is other or (isinstance(one, _VALUES) and type(one) is type(other) and one == other)


class Feed:
    """The batches of a DataLoader, from any position of an epoch on.

    Reading neither changes nor uses the RNG state of the process.

    Args:
        loader: a DataLoader from the user, or built from a configuration.
        shard: (index, count) of the data shard that this process reads.
    """

    _given: dict[str, Any] | None = None  # to workers that are kept
    _has_told = False

    def __init__(self, loader: DataLoader[Any], shard: tuple[int, int] = (0, 1)) -> None:
        self.loader, self.shard = loader, shard
        self.is_stream = isinstance(loader.dataset, IterableDataset)
        self.repeatable: Repeatable | None = None
        """The order of a sampler that is not flextrain's; it is repeated from the beginning of the epoch."""
        batches = loader.batch_sampler
        self.sampler: Any = sampler_of(loader)
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

    @cached_property
    def _own_samplers(self) -> list[Any]:
        """Samplers of the user's, which may change from pass to pass."""
        batches = self.loader.batch_sampler
        return [part for part in samplers_in(self.sampler if batches is None else batches) if _is_users(part)]

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
        own_seed = order + (0 if self.is_stream and self._is_divided else self.shard[0])  # which needs one order
        if diff_shard_seed and not self._is_divided:
            order = own_seed
        self._read.generator.manual_seed(own_seed)  # draws the workers' seeds
        if self.is_stream:
            return self._part_of_stream(order, own_seed, epoch, start, stop)
        # A generator inside a dataset starts from its worker's seed, which must differ when an epoch is continued.
        self._read.generator.manual_seed(nth_seed(own_seed, start) >> 1)
        vars(self._dataset).update(epoch=epoch, dataset=self.loader.dataset, collate=self.loader.collate_fn)
        if self.repeatable is not None:
            self.repeatable.position(order, start, stop)
            self._note_pass(epoch)
        else:
            self.sampler.set_span(start, stop)
            if isinstance(self.sampler, DefaultSampler):  # which evaluation may use too
                self.sampler.batches = self.exact
        turns = self._turns_from(epoch_seed(seed, epoch), epoch, start)
        if not self._read.num_workers and not self._read.pin_memory:
            return map(self._dataset.__getitem__, turns)  # does the same as the DataLoader, some microseconds faster
        self._turns.turns = turns
        return self._from_workers() if self._read.num_workers else iter(self._read)

    def _note_pass(self, epoch: int) -> None:
        """Count a pass that samplers of the user's begin, and tell it to those inside of others too."""
        for part in self._own_samplers:
            tell_epoch(part, epoch)
            if (known := _begun(part)) is None:
                known = _BEGUN[id(part)] = _Begun(ref(part), epoch, _digest(part))
            known.passes += 1

    def make_former_passes(self, seed: int, epochs: int, name: str, diff_shard_seed: bool = False) -> bool:
        """Make the passes before a resumed one with samplers of the user's that change in them; return whether they do.

        One may shuffle a list of its own in place, or count its passes. Of one that has begun other passes in this process, a
        warning says that they cannot be made again.
        """
        if self.repeatable is None or not self._own_samplers:
            return False
        begun = [known for part in self._own_samplers if (known := _begun(part)) is not None]
        if any(known.has_changed() for known in begun):
            if any(known.passes != epochs for known in begun):
                _logger.warning(
                    f"train_dataloader: {name} has begun {counted(begun[0].passes, 'pass', 'passes')} in this process and changes in each, so "
                    f"that pass {epochs + 1} cannot be made again: samples are lost or come twice; give every run a new one"
                )
            return False
        for known in begun:
            known.passes = 0
        apart = self.shard[0] if diff_shard_seed and not self._is_divided else 0
        for epoch in range(epochs):
            for part in self._own_samplers:
                tell_epoch(part, epoch)
            before = [held(vars(part)) for part in self._own_samplers]
            self._note_pass(epoch)
            self.repeatable.position(order_seed(seed, epoch) + apart, 0, None)
            for _ in self.repeatable:
                heartbeat()
            if not epoch and before == [held(vars(part)) for part in self._own_samplers]:
                return False
        return epochs > 0

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
        self._end_outdated_workers()
        for batch in self._read:
            forget_spare_normal()  # like a batch that is read in this process
            yield batch

    def _end_outdated_workers(self) -> None:
        """Let kept workers begin anew if something has changed in what they were given, as by a hook that ends an augmentation."""
        if not self._read.persistent_workers:
            return
        before, self._given = self._given, _held_by(dataset=self.loader.dataset, collate_fn=self.loader.collate_fn)
        changed = [] if before is None else _changed(before, self._given, self._read.dataset.epoch)  # type: ignore[attr-defined]
        if vars(self.loader).get(INITIALIZED) is False:  # by which hooks of mmdetection ask for it
            changed.append("the dataloader")
        if not changed:
            return
        end_kept_workers(self._read)
        if not self._has_told:
            self._has_told = True
            _logger.info(
                f"{changed[0]} has changed since workers were given it: they begin anew, in spite of persistent_workers"
            )

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
        self._read.collate_fn = CollateOfStream(self.loader.collate_fn)
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
        samples, collate = iter(loader.dataset), self._read.collate_fn
        if loader.batch_size is None:
            return map(collate, samples)
        groups = iter(lambda: list(islice(samples, loader.batch_size)), [])
        if loader.drop_last:
            groups = (group for group in groups if len(group) == loader.batch_size)
        return map(collate, groups)


@dataclass
class _Begun:
    """A sampler of the user's that was read in this process."""

    sampler: Callable[[], Any]
    """A weak reference."""
    epoch: int
    """What it was told before its first pass."""
    first: str
    """A digest of what it held then."""
    passes: int = 0

    def has_changed(self) -> bool:
        """Whether it is another than before its first pass."""
        tell_epoch(self.sampler(), self.epoch)
        return _digest(self.sampler()) != self.first


_BEGUN: dict[int, _Begun] = {}
"""Samplers of the user's that were read in this process, by identity, because one may not be hashable."""


def _begun(sampler: Any) -> _Begun | None:
    known = _BEGUN.get(id(sampler))
    return known if known is not None and known.sampler() is sampler else None


def _digest(sampler: Any) -> str:
    return hashlib.sha256(repr(held(vars(sampler))).encode()).hexdigest()


def _is_users(sampler: Any) -> bool:
    """True if a sampler is neither torch's nor of this library, and so may change from pass to pass."""
    return hasattr(sampler, "__dict__") and type(sampler).__module__.partition(".")[0] not in _OF_LIBRARIES


_OF_LIBRARIES = ("torch", "torchdata", __name__.partition(".")[0])


class _Turns(Sampler[Turn]):
    """A sampler that yields the turns it was given last.

    It has no reference to Feed: workers of a loader in a reference cycle end only after a wait of five seconds each.
    """

    def __init__(self) -> None:
        self.turns: Iterator[Turn] = iter(())

    def __iter__(self) -> Iterator[Turn]:
        return self.turns


# Reader: reads custom loaders from the beginning of an epoch, or from their own saved state.


class Reader:
    """The batches of a loader with an order of its own, from any number on.

    Random numbers drawn in this process for a batch depend only on the seed and the batch's number. So reading again
    gives the same batch, whatever the model or other batches have drawn.

    Args:
        loader: an object with ``__iter__``. If it has ``state_dict`` and ``load_state_dict``, reading continues from
            its state; any other loader is read from the beginning of the epoch up to the wanted batch.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.keeps_position = keeps_position(loader)
        self.is_placed = False
        """True if the loader's state was restored and nothing has been read since."""
        self._placed_at = 0  # the number of the next batch then
        self._has_begun, self._has_ended = False, True
        self._given = 0  # batches of the pass

    def batches(self, seed: int, start: int, stop: int | None) -> Iterator[Any]:
        """Yield the batches of an epoch, or of the rest of it, from number ``start`` to ``stop``."""
        self._seed_generators(seed)
        if self.keeps_position and start and not (self.is_placed or self._has_ended):
            self._go_on(start)
        first = self._placed_at if self.is_placed else 0
        again, self._has_begun = self._has_begun and (start == 0 or not self.is_placed), True
        self.is_placed = self._has_ended = False
        stream = RandomStream(_mixed(seed, 0))
        with stream:
            own = begun_anew(self.loader) if again else iter(self.loader)
        for number in count(first) if stop is None else range(first, stop):
            if number:  # number 0 continues the stream of iter(): a sampler may draw its order in either
                stream.begin(_mixed(seed, number))
            with stream:
                batch = next(own, _END)
            if batch is _END:
                self._has_ended = True
                return
            self._given = number + 1
            if number >= start:
                yield batch

    def _go_on(self, start: int) -> None:
        """Continue a pass that an exception has ended, at the loader's own state.

        Raises:
            DataError: the state is that of a later batch.
        """
        if self._given != start:
            raise DataError(
                f"train_dataloader: {name_of(self.loader)} was left after {counted(self._given, 'batch', 'batches')}, of which {start} were "
                "trained on, and cannot go back; runner.resume(path) goes on from a checkpoint"
            )
        self.loader.load_state_dict(self.loader.state_dict())
        self.is_placed, self._placed_at = True, start

    def _seed_generators(self, seed: int) -> None:
        """Seed the generators inside the loader and its samplers, like those of flextrain's own loaders."""
        seed_own_generators(self.loader, seed)
        seed_own_generators(getattr(self.loader, "batch_sampler", None), seed)
        for part in (
            *chain_of(getattr(self.loader, "sampler", None)),
            *chain_of(getattr(self.loader, "batch_sampler", None)),
        ):
            if isinstance(part, ShardedSampler):
                part.set_span(0)

    # The loader's own state

    def state(self) -> dict[str, Any] | None:
        """Return the loader's state after the last batch, as JSON can represent it; None if the loader has no state.

        Raises:
            CheckpointError: the state holds something other than plain values and tensors.
        """
        if not self.keeps_position:
            return None
        where = f"train_dataloader ({name_of(self.loader)}.state_dict)"
        return {"state": pack(self.loader.state_dict(), where), "ended": self._has_ended}

    def load_state(self, saved: Mapping[str, Any], number: int, begins: bool) -> None:
        """Restore the loader's state for the next read, which begins with batch ``number``; ``begins``: with a whole epoch."""
        self.loader.load_state_dict(unpack(saved["state"]))
        self.is_placed = self._has_begun = True
        self._placed_at = number
        if begins and not saved["ended"]:
            # The saved epoch ended early because another process had no more batches; end it early again.
            next(iter(self.loader), None)


def begun_anew(loader: Any) -> Iterator[Any]:
    """Yield the batches of a further pass; an iterator that is at its end is reset first."""
    is_empty = True
    for batch in loader:
        is_empty = False
        yield batch
    if is_empty:
        reset = getattr(loader, "reset", None)
        if callable(reset):
            reset()
        yield from loader


def _mixed(seed: int, number: int) -> int:
    """Return one seed from two numbers, so that epochs and batches have independent streams."""
    return (seed * 6364136223846793005 + number * 1442695040888963407) % 2**63


# ExactEpochs: epochs in which each sample counts exactly once, on any number of processes.


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


# Reading data again from their beginning, up to the position of a resumed run; says how long it takes.


logger = logging.getLogger("flextrain")


def timed(batches: Iterator[Any], skipped: int, name: str) -> Iterator[Any]:
    """Yield the batches, whose first one comes after ``skipped`` others were read; log what it does, and the time it took."""
    before = counted(skipped, "batch", "batches")
    logger.info(
        f"train_dataloader: reads {before} of {name} again to continue after them; data with state_dict need not"
    )
    begin = time.perf_counter()
    for number, batch in enumerate(batches):
        if not number:
            seconds = time.perf_counter() - begin
            logger.info(
                f"train_dataloader: read {before} of {name} again in {seconds:.1f} s, {seconds / skipped * 1000:.3g} ms each"
            )
        yield batch


# IterableDatasets that have a state, such as those of Hugging Face datasets: read by a loader that keeps it.


def loader_of_stream(
    dataset: Any, kwargs: Mapping[str, Any], training: bool, where: str, logger: logging.Logger
) -> Any:
    """Return the DataLoader of an IterableDataset; one that keeps the position if the dataset has a state.

    With worker processes that is torchdata's StatefulDataLoader, because the state is in the workers.
    """
    if not training or not keeps_position(dataset):
        if training and (why := why_not_by_state(dataset)):
            logger.info(f"{where}: resuming in the middle of an epoch reads the stream again from its beginning, {why}")
        return DataLoader(dataset, **kwargs)
    if not kwargs.get("num_workers"):
        return _said(
            StreamLoader(dataset, **{**kwargs, "collate_fn": CollateOfStream(kwargs["collate_fn"])}), where, logger
        )
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError:
        logger.warning(
            f"{where}: {type(original(dataset)).__name__} has a state_dict, which is in its workers: a resumed run reads it again from "
            "the beginning; pip install torchdata, or give num_workers=0, to save the position"
        )
        return DataLoader(dataset, **kwargs)
    init, collate = WorkerInit(kwargs.get("worker_init_fn")), CollateOfStream(kwargs["collate_fn"])
    return _said(
        StatefulDataLoader(dataset, **{**kwargs, "worker_init_fn": init, "collate_fn": collate}), where, logger
    )


def _said(loader: Any, where: str, logger: logging.Logger) -> Any:
    loader.is_made_here = True  # and is named after the user's stream
    say_how_it_resumes(loader, where, logger)
    return loader


class StreamLoader(DataLoader[Any]):
    """A DataLoader without workers whose state is that of its IterableDataset.

    The state is taken after the last batch that was given: no sample is read ahead.
    """

    def __iter__(self) -> Any:
        # DataLoader's own, which reads no further than the batch that it gives. A class that has this method is read by
        # its state.
        return super().__iter__()

    def state_dict(self) -> dict[str, Any]:
        """Return the dataset's state."""
        return {"dataset": self.dataset.state_dict()}  # type: ignore[attr-defined]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the dataset's state; the next iteration begins there.

        Raises:
            CheckpointError: the state is that of another loader.
        """
        if set(state) != {"dataset"}:
            raise CheckpointError(
                "train_dataloader: the checkpoint has the state of another loader, with other keys; num_workers has to be 0 as "
                "it was, or above 0 as it was"
            )
        self.dataset.load_state_dict(state["dataset"])  # type: ignore[attr-defined]
