"""Build dataloaders that are split over processes, and read them in windows from any position."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal, cast

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from ...core.base.config import Config
from ...core.base.errors import ConfigError, counted
from ...core.base.events import heartbeat
from ...core.base.registry import DATA_SAMPLERS
from ...core.comm.collectives import all_gather_object, is_alone
from ...core.comm.topology import Topology
from . import checks
from . import checks as first_samples
from .collate import build_collate
from .dataset_wrappers import build_dataset, is_config
from .lockstep import HeldBatches, InStep, SameBatches
from .readers import Counted, ExactEpochs, Feed, Reader, loader_of_stream, timed
from .sample_seeds import order_seed
from .samplers import (
    DefaultSampler,
    InfiniteSampler,
    ShardedSampler,
    chain_of,
    divided_sampler,
    held_in,
    tell_epoch,
    tell_loader_epoch,
    use_shard,
    warn_of_passes,
)
from .streams.divided_streams import divided, divided_passes, original
from .user_loaders import (
    adopt,
    divided_samplers,
    from_elsewhere,
    goes_its_own_way,
    is_divided,
    length_of,
    name_of,
    sampler_of,
    say_how_it_resumes,
)

# Build the sampler that a dataloader's configuration describes.


def build_sampler(
    sampler: Any,
    dataset: Any,
    *,
    training: bool,
    seed: int,
    shard: tuple[int, int] | None,
    where: str,
    asked: bool | None = None,
) -> Any:
    """Return the sampler that a configuration describes, or one that is built already, with its data shard.

    Args:
        sampler: ``dict(type=...)``, the name of a type, or a sampler.
        dataset: what it samples.
        training: False: no sample is repeated unless the configuration says so.
        seed: of the order, unless the configuration has one.
        shard: (index, count) of this process's data shard; None: a runner says so later.
        where: the configuration key, for messages.
        asked: the dataloader's ``shard``; False: a DistributedSampler may have another data shard.
    """
    if is_config(sampler):
        spec = dict(sampler) if isinstance(sampler, Mapping) else {"type": sampler}
        extra: dict[str, Any] = {"dataset": dataset, **({} if shard is None else {"shard": shard})}
        if "seed" not in spec:
            extra["seed"] = seed
        if not training and "round_up" not in spec:
            extra["round_up"] = False
        sampler = DATA_SAMPLERS.build(spec, where, **extra)
    if shard is not None:
        use_shard(sampler, shard, where, asked)
    return sampler


_UNKNOWN = object()

Splittable = DefaultSampler | InfiniteSampler
"""Samplers that can split the rest of an epoch again, from any position."""


def build_dataloader(
    cfg: Any,
    *,
    training: bool,
    seed: int,
    shard: tuple[int, int] | None,
    where: str,
    logger: logging.Logger,
    pins: bool = False,
) -> Any:
    """Build the DataLoader that a configuration describes, split over processes, or return another source of batches.

    Args:
        cfg: ``dict(dataset=..., batch_size=..., sampler=dict(...), collate_fn=dict(...), ...)``, a DataLoader, or
            another object that gives batches. ``worker_init_fn=dict(type=..., **arguments)`` names a function of the
            worker's number, which is told ``num_workers``, ``rank`` (the index of the data shard) and ``seed`` if it
            takes them. ``num_batch_per_epoch`` reads only the first samples of the dataset, that many batches per
            process. In a DataLoader, torch's own sequential or random sampler is replaced by
            a DefaultSampler. A list of batches is split by a DefaultSampler too. ``shard=True`` lets each process keep its
            part of what a stream or a sampler of the user's gives to all of them; with ``shard=False`` every process has data
            of its own, which are not split. ``dict(loader=..., shard=...)`` says so of a loader or function.
        training: shuffle by default, and give every process equally many samples; otherwise no sample is repeated.
        seed: seed of the order and of the workers.
        shard: (index, count) of this process's data shard; None: a runner says so when it gets the DataLoader.
        where: the configuration key, for messages.
        logger: logs which samplers were replaced.
        pins: a configuration with workers that does not say it loads into page-locked memory.
    """
    checks.check_dataloader(cfg, where, training)
    told, shard = shard is not None, shard or Topology().shard
    rank = shard[0]
    cfg, asked = checks.loader_and_shard(cfg)
    if asked is False:
        told, shard = True, (0, 1)
    if not isinstance(cfg, Mapping):
        for key in ("sampler", "batch_sampler"):
            use_shard(getattr(cfg, key, None), shard, f"{where}.{key}", asked if told else False)
        loader = (
            adopt(cfg, training, seed, shard, asked, where, logger)
            if isinstance(cfg, DataLoader)
            else from_elsewhere(cfg, training, shard, asked, where, logger)
        )
        checks.check_follows_order(loader, where)
        if training:
            say_how_it_resumes(loader, where, logger)
        return loader
    kwargs = dict(cfg)
    if pins and kwargs.get("num_workers"):  # what this process loads may be on the device already
        kwargs.setdefault("pin_memory", True)
    dataset, limit = kwargs.pop("dataset"), kwargs.pop(first_samples.KEY, None)
    if is_config(dataset):
        dataset = build_dataset(dataset, f"{where}.dataset")
        checks.check_dataset(dataset, cfg, where, training)
    if hasattr(dataset, "full_init"):
        dataset.full_init()
    dataset = first_samples.limited(dataset, limit, kwargs, shard[1], where)
    in_batch = None if kwargs.get("batch_sampler") is not None else kwargs.get("batch_size", 1)
    checks.check_has_batches(dataset, in_batch, kwargs.get("drop_last"), where)
    collate = build_collate(kwargs.pop("collate_fn", "pseudo_collate"), f"{where}.collate_fn")
    facts = {"num_workers": kwargs.get("num_workers", 0), "rank": rank, "seed": seed}
    kwargs |= checks.build_worker_init(kwargs.get("worker_init_fn"), facts, f"{where}.worker_init_fn")
    kwargs |= {"collate_fn": collate, "generator": torch.Generator()}
    if isinstance(dataset, IterableDataset):
        if training:
            dataset = divided_passes(dataset, shard, asked, where, logger)
        else:
            dataset = divided(dataset, shard, asked, False, where, logger)
        return loader_of_stream(dataset, kwargs, training, where, logger)
    sampler = kwargs.pop("sampler", None)
    shuffle = kwargs.pop("shuffle", training)
    if sampler is None:
        sampler = {"type": "DefaultSampler", "shuffle": shuffle}
    own = shard if told else None
    sampler = build_sampler(
        sampler, dataset, training=training, seed=seed, shard=own, where=f"{where}.sampler", asked=asked
    )
    batch_sampler = kwargs.pop("batch_sampler", None)
    if batch_sampler is None:
        _, sampler = divided_samplers(None, sampler, shard, asked, training, where, logger)
        return checks.check_follows_order(DataLoader(dataset, sampler=sampler, **kwargs), where)
    size = kwargs.pop("batch_size", 1)
    drop_last = kwargs.pop("drop_last", False)
    if is_config(batch_sampler):
        batch_sampler = DATA_SAMPLERS.build(
            batch_sampler, f"{where}.batch_sampler", sampler=sampler, batch_size=size, drop_last=drop_last
        )
    use_shard(batch_sampler, shard, f"{where}.batch_sampler", asked if told else False)
    inside = getattr(batch_sampler, "sampler", None)
    batch_sampler, _ = divided_samplers(batch_sampler, inside, shard, asked, training, where, logger)
    return checks.check_follows_order(DataLoader(dataset, batch_sampler=batch_sampler, **kwargs), where)


class LeftOut(Config):
    """A span of the training data that is not trained on, because training went back and jumps over it."""

    epoch: int
    start: int
    stop: int | None
    """None: the rest of the epoch."""
    counts: Literal["samples", "updates"]
    """Samples are counted over all processes; updates where the order cannot be split again."""

    def words(self) -> str:
        """Return it for a message."""
        to = "to the end" if self.stop is None else f"to {self.stop}"
        return f"{self.counts} {self.start} {to} of epoch {self.epoch + 1}"


class TrainData:
    """The batches of the training set in accumulation windows, from any position of any epoch.

    No sample at or after ``stop`` is read, and none before ``start``. Only a stream (IterableDataset) has to be read
    from its beginning.

    With flextrain's samplers the position in an epoch is a number of samples over all processes, and the epoch can
    continue there with windows of another size (``resume_at``). With other samplers, custom batch samplers and streams
    the position is a number of batches, whose order cannot be split again. The same holds for custom loaders, which a
    Reader reads.

    Processes whose data may differ in length end their epochs together, after ``compare_lengths`` was called.

    Args:
        loader: result of ``build_dataloader``.
        accumulate: number of micro-batches per window.
        seed: seed of random numbers in samples, and of samplers that are not flextrain's.
        diff_rank_seed: such samplers draw different numbers in every process.
        shard: (index, count) of the data shard that this process reads.
    """

    _held: HeldBatches | None = None
    prints = ""
    """Fingerprints of the datasets of all processes, if each has its own."""

    def __init__(
        self, loader: Any, accumulate: int, seed: int, diff_rank_seed: bool = False, shard: tuple[int, int] = (0, 1)
    ) -> None:
        self.loader, self.accumulate, self.seed, self.diff_rank_seed = loader, accumulate, seed, diff_rank_seed
        self.dataset, batches = getattr(loader, "dataset", None), getattr(loader, "batch_sampler", None)
        self._sampler = sampler_of(loader)
        self._divided = divided_sampler(loader)
        self.infinite = isinstance(self._sampler, InfiniteSampler)
        self._batch_size = getattr(batches, "batch_size", 1)
        self.drop_last = bool(getattr(batches, "drop_last", False))
        self._reader = Reader(loader) if goes_its_own_way(loader) else None
        self._in_step: InStep | SameBatches | None = None
        self._least: int | None = None  # batches of an epoch on the process with the fewest
        self._first_samples: Any = _UNKNOWN
        self._has_compared = self._said_length = False
        # An epoch resumed with another window size: its number, one of its windows, and the position of that window.
        self._origin = (-1, 0, 0)
        self.left_out: list[LeftOut] = []
        """What is jumped over, in the order of training."""
        self._shard = shard
        self._feed = None if self._reader is not None else Feed(loader, shard)
        self.exact = ExactEpochs.of(self._feed, shard[1])

    def use_seed(self, seed: int) -> None:
        """Set another seed, also in a sampler without a seed of its own."""
        if isinstance(self._sampler, ShardedSampler) and self._sampler.seed == self.seed:
            self._sampler.seed = seed
        self.seed = seed

    @property
    def num_batches(self) -> int | None:
        """Batches of one epoch on this process; None if there is no end, or if it is unknown."""
        return self._own_length if self._least is None else self._least

    @property
    def _own_length(self) -> int | None:
        if self.exact is not None:
            return self.exact.batches_from(0)
        return None if self.infinite else length_of(self.loader)

    @property
    def epoch_length(self) -> int | None:
        """Windows of one epoch; None if there is no end, or if it is unknown."""
        return None if self.num_batches is None else math.ceil(self.num_batches / self.accumulate)

    def no_batch(self) -> ConfigError:
        """Return the error to raise when an epoch has no batch."""
        if self._reader is None:
            advice = "its dataset is empty or smaller than a dropped last batch"
        elif is_alone():
            advice = "one that can be read once needs a reset()"
        else:
            advice = "here or on another process; one that can be read once needs a reset()"
        return ConfigError(f"train_dataloader: {name_of(self.loader)} gives no batch, {advice}")

    # Several processes

    def compare_lengths(self, timeout_s: float | None = None, topology: Topology | None = None) -> None:
        """Compare the lengths of all processes' data, and let their epochs end together if they may differ.

        A collective, to be called before training; a second call does nothing.

        Args:
            timeout_s: longest time in seconds that a process may take for its next window.
            topology: the run's; batches of processes with the same data shard are compared, too.

        Raises:
            ConfigError: a sampler splits the dataset, and its length differs between processes.
        """
        if not is_alone() and not self._has_compared:
            self._has_compared = True
            self._compare(timeout_s, topology)

    def _compare(self, timeout_s: float | None, topology: Topology | None) -> None:
        own = (length_of(self.dataset), self._own_length, self._is_even, self.keeps_position)
        is_needed = checks.needs_same_data(self.loader, self._shard)
        begin = None if self._divided is None else self._divided.begin(order_seed(self.seed, 0))
        samples, lengths, even, keeps_position, needed, prints, begins = zip(
            *all_gather_object((*own, is_needed, checks.print_of(self.dataset), begin)), strict=True
        )
        checks.check_same_begin(begins, "train_dataloader")
        self._first_samples = samples[0]
        if any(needed):
            checks.check_same_length(samples, "train_dataloader")
        self.prints = checks.prints_of_all(prints, any(needed))
        if not all(even):
            self._in_step = InStep(
                "train_dataloader",
                processes=len(samples),
                shards=self._shard[1],
                ahead=not any(keeps_position),
                timeout_s=timeout_s,
            )
            self._least = None if None in lengths else min(lengths)
        if topology is not None and topology.shares_data:
            self._in_step = SameBatches("train_dataloader", self._shard[0], self._in_step, timeout_s)

    @property
    def _is_even(self) -> bool:
        """True if every process is certain to have equally many batches."""
        if self._reader is not None or isinstance(self.dataset, IterableDataset):
            return False
        if type(self.loader.batch_sampler) not in (BatchSampler, type(None)):
            return False
        if isinstance(self._sampler, ShardedSampler):
            is_equal = self.exact is not None or getattr(self._sampler, "round_up", True)
            return is_equal and self._sampler.count == self._shard[1]
        return type(self._sampler) is DistributedSampler

    # The position in an epoch

    @property
    def splittable(self) -> Splittable | None:
        """The sampler, if it can split the rest of its epoch again; otherwise None."""
        fed = self._feed is not None and self._feed.by_position and not self._feed.has_own_data
        return self._sampler if fed and isinstance(self._sampler, Splittable) else None

    @property
    def draws_apart(self) -> bool:
        """Whether what is drawn for the order of the data differs between processes."""
        return self._shard[1] > 1 and self.splittable is None and not is_divided(self.loader)

    @property
    def sampler_name(self) -> str:
        """The name of the class or function that determines the order of the batches."""
        if self._reader is not None:
            return name_of(self.loader)
        if isinstance(self.dataset, IterableDataset):
            return name_of(original(self.dataset))
        if self._divided is not None:
            return type(self._divided.sampler).__name__
        own_batches = type(self.loader.batch_sampler) not in (BatchSampler, type(None))
        return type(self.loader.batch_sampler if own_batches else self._sampler).__name__

    @property
    def num_samples(self) -> int | None:
        """Samples of the dataset, on rank 0 if processes differ; None for a stream of unknown length."""
        return length_of(self.dataset) if self._first_samples is _UNKNOWN else self._first_samples

    @property
    def stream_workers(self) -> int | None:
        """Number of workers that read a stream, whose order and state depend on it; None for other data."""
        is_stream = isinstance(self.dataset, IterableDataset)
        return getattr(self.loader, "num_workers", None) if is_stream else None

    def position(self, epoch: int, window: int) -> int | None:
        """Return the samples of the epoch before a window, over all processes; None if positions count batches."""
        sampler = self.splittable
        if sampler is None:
            return None
        position = self._position_at(epoch, window)
        return position if self.infinite else min(position, sampler.num_samples)

    def resume_at(self, epoch: int, position: int) -> int:
        """Continue an epoch at a position, in windows of the current size, and return the window that begins there.

        Windows are numbered as if the whole epoch had the current window size, rounded down.
        """
        window = position // self._stride
        self._origin = (epoch, window, position)
        if not self.infinite and self.length(epoch) == window and self.epoch_length:
            self._origin = (-1, 0, 0)  # less than a batch is left, which is dropped: the epoch is over
            return self.epoch_length
        return window

    def length(self, epoch: int) -> int | None:
        """Return the number after an epoch's last window; it may differ from ``epoch_length`` in a resumed epoch."""
        if self.splittable is None or self.infinite or epoch != self._origin[0]:
            return self.epoch_length
        _, window, position = self._origin
        samples = cast(DefaultSampler, self.splittable).length_from(position)
        batches = samples // self._batch_size if self.drop_last else math.ceil(samples / self._batch_size)
        if self.exact is not None:
            batches = self.exact.batches_from(position)
        return window + math.ceil(batches / self.accumulate)

    # What is left out

    def begin_anew(self) -> None:
        """Forget where an epoch was resumed, before another checkpoint is."""
        self._origin, self.left_out = (-1, 0, 0), []

    def lasting_position(self, epoch: int, window: int) -> int:
        """Return a position that stays valid when batches change: in samples, or in updates if the order cannot be split."""
        position = self.position(epoch, window)
        return window if position is None else position

    @property
    def position_counts(self) -> Literal["samples", "updates"]:
        """What ``lasting_position`` counts."""
        return "updates" if self.splittable is None else "samples"

    def spans(self, begin: tuple[int, int], end: tuple[int, int]) -> list[LeftOut]:
        """Return what lies from one (epoch, lasting position) to another, in each epoch."""
        spans, whole = [], self.epoch_length
        if self.splittable is not None:
            whole = None if self.infinite else self.splittable.num_samples
        for epoch in range(begin[0], end[0] + 1):
            start = begin[1] if epoch == begin[0] else 0
            stop = end[1] if epoch == end[0] else None
            until = whole if stop is None else stop
            if until is None or start < until:
                spans.append(LeftOut(epoch=epoch, start=start, stop=stop, counts=self.position_counts))
        return spans

    def go_on_at(self, epoch: int, window: int) -> int | None:
        """Return the window to go on with, after what is left out; None: nothing of the epoch is left."""
        position = self.lasting_position(epoch, window)
        for span in self.left_out:
            if span.epoch == epoch and span.start <= position and (span.stop is None or position < span.stop):
                if span.stop is None:
                    return None
                position = span.stop
                window = position if self.splittable is None else self.resume_at(epoch, position)
        return window

    def pass_over(self, epoch: int, window: int) -> None:
        """Leave out the rest of an epoch from a window on: data in the middle of it, or that count their passes, are read to its end."""
        if self._reader is not None and (self._reader.is_placed or self._reader.keeps_position):
            for _ in self._batches(epoch, window, None):
                heartbeat()

    @property
    def _stride(self) -> int:
        """Samples per window, over all processes."""
        return int(self.accumulate * self._batch_size * cast(ShardedSampler, self._sampler).count)

    def _position_at(self, epoch: int, window: int) -> int:
        first, position = self._origin[1:] if epoch == self._origin[0] else (0, 0)
        return position + (window - first) * self._stride

    # The loader's own state

    def loader_state(self) -> Any:
        """Return the state of a loader that has one, after the last finished update, as JSON can represent it.

        Raises:
            CheckpointError: the state holds something other than plain values and tensors.
        """
        return None if self._reader is None else self._reader.state()

    def load_loader_state(self, state: Any, window: int, begins: bool) -> None:
        """Restore the loader's own state, of before a window; ``begins``: an epoch begins there."""
        assert self._reader is not None
        self._reader.load_state(state, window * self.accumulate, begins)

    @property
    def keeps_position(self) -> bool:
        """True if the loader's own state determines the next batch."""
        return self._reader is not None and self._reader.keeps_position

    # Reading

    def windows(self, epoch: int, start: int = 0, stop: int | None = None) -> Iterator[list[Any]]:
        """Yield the windows of an epoch from number ``start`` to ``stop``; the epoch's last window may be shorter."""
        own = self._own_windows(epoch, start, stop)
        if self.exact is not None:
            own = self.exact.windows(own, start, cast(int, self.length(epoch)) - 1, self.last_counted(epoch))
        return own if self._in_step is None else self._in_step.windows(own, start)

    @property
    def counted(self) -> Counted | None:
        """What counts of the window given last; None: all of its micro-batches, equally."""
        return None if self.exact is None else self.exact.now

    def last_counted(self, epoch: int, stop: int | None = None) -> Counted | None:
        """Return what counts of the last window of an epoch, if windows are read up to ``stop``; see ``counted``."""
        last = self.length(epoch)
        if self.exact is None or last is None or (stop is not None and stop < last):
            return None
        return self.exact.counted(self._position_at(epoch, last - 1), self.accumulate)

    def close(self) -> None:
        """End worker processes that would be kept for the next epoch."""
        if self._feed is not None:
            self._feed.close()

    def _own_windows(self, epoch: int, start: int, stop: int | None) -> Iterator[list[Any]]:
        size, number, window = self.accumulate, start, list[Any]()
        batches = self._batches(epoch, start, stop)
        for batch in batches if size == 1 and self._in_step is None else self._hold(batches):
            window.append(batch)
            if len(window) == size:
                yield window
                window = []
                number += 1
            else:
                heartbeat()
        if window:
            yield window
        if number != stop and number + len(window) != start:
            self._warn_of_length(number * size + len(window))

    def _hold(self, batches: Iterator[Any]) -> Iterator[Any]:
        if self._held is None:
            ahead = self._in_step is not None
            self._held = HeldBatches("train_dataloader", self.accumulate * (1 + ahead))
        return self._held.of(batches)

    def _warn_of_length(self, found: int) -> None:
        """Warn once if an epoch did not have as many batches as ``len`` of the data."""
        said = self._own_length
        if self.splittable is None and said is not None and said != found and not self._said_length:
            self._said_length = True
            logging.getLogger("flextrain").warning(
                f"train_dataloader: len() of {self.sampler_name} says {counted(said, 'batch', 'batches')}, but the epoch had "
                f"{found}; all of them are trained on, schedules and the estimated time use len()"
            )

    def tell_samplers(self, epoch: int) -> None:
        """Tell samplers the epoch, on which their length may depend."""
        for part in (*chain_of(self._sampler), getattr(self.loader, "batch_sampler", None)):
            tell_epoch(part, epoch)

    def begin_at(self, epoch: int) -> None:
        """Warn if this process begins in a later pass, and the data, which are read again, cannot know it.

        A sampler of the user's is taken through the passes before.
        """
        if self._feed is not None and self._feed.make_former_passes(
            self.seed, epoch, self.sampler_name, self.diff_rank_seed
        ):
            passes = counted(epoch, "pass", "passes")
            logging.getLogger("flextrain").info(
                f"train_dataloader: {self.sampler_name} changes in each of its passes, so the {passes} before are made again"
            )
        self.tell_samplers(epoch)
        if not epoch or (self._reader is None and not isinstance(self.dataset, IterableDataset)):
            return
        parts = (
            self.loader,
            original(self.dataset),
            *held_in(original(self.dataset)),
            *chain_of(self._sampler),
            getattr(self.loader, "batch_sampler", None),
        )
        warn_of_passes(parts, self.sampler_name, epoch)

    def _batches(self, epoch: int, first: int, end: int | None) -> Iterator[Any]:
        """Yield the batches of an epoch from window ``first`` to window ``end``."""
        tell_loader_epoch(self.loader, epoch)
        start, stop = first * self.accumulate, None if end is None else end * self.accumulate
        if self._feed is None:
            assert self._reader is not None
            own = self._shard[0] if self.diff_rank_seed and not is_divided(self.loader) else 0
            again = start and not self._reader.is_placed
            read = self._reader.batches(order_seed(self.seed, epoch) + own, start, stop)
            return timed(read, start, self.sampler_name) if again else read
        if self._feed.by_position:
            start, stop = self._position_at(epoch, first), None if end is None else self._position_at(epoch, end)
        read = self._feed.batches(self.seed, epoch, start, stop, diff_shard_seed=self.diff_rank_seed)
        return timed(read, start, self.sampler_name) if start and self._feed.is_stream else read
