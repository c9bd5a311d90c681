"""Samplers and dataloaders that are split over processes and continue from any position."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any, cast

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler

from ..core.config import check_call
from ..core.distributed import get_rank, get_world_size
from ..core.errors import ConfigError
from ..core.registry import DATA_SAMPLERS, DATASETS, FUNCTIONS
from ..core.seed import load_rng_state, rng_state


class ShardedSampler(Sampler[int]):
    """Base of samplers whose position is a number of samples over all processes together.

    A run that stops after ``n`` samples continues at position ``n`` on any number of processes.

    Args:
        dataset: anything with a length.
        shuffle: a new random order every epoch; False keeps the dataset's.
        seed: of the order; the same on all processes.
        shard: (index, count) of this process's part; default: rank and world size.
    """

    def __init__(
        self, dataset: Sized, shuffle: bool = True, seed: int | None = None, *, shard: tuple[int, int] | None = None
    ) -> None:
        self.num_samples = len(dataset)
        self.shuffle = shuffle
        self.seed = seed or 0
        self.index, self.count = shard or (get_rank(), get_world_size())
        self.epoch = 0
        self.start, self.stop = 0, None

    stop: int | None

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order comes next."""
        self.epoch = epoch

    def set_span(self, start: int, stop: int | None = None) -> None:
        """Yield only the samples at global positions ``start`` up to ``stop`` of the epoch from now on."""
        self.start, self.stop = start, stop

    def order(self, epoch: int) -> list[int]:
        """All indices of the dataset in the order of ``epoch``."""
        if not self.shuffle:
            return list(range(self.num_samples))
        generator = torch.Generator().manual_seed(self.seed + epoch)
        return torch.randperm(self.num_samples, generator=generator).tolist()


@DATA_SAMPLERS.register_module()
class DefaultSampler(ShardedSampler):
    """Every sample once per epoch, dealt to the processes in turn.

    Args:
        round_up: repeat samples from the beginning of the order until every process has as many; with False processes
            may have one less, which evaluation can do with and training cannot.
    """

    def __init__(
        self,
        dataset: Sized,
        shuffle: bool = True,
        seed: int | None = None,
        round_up: bool = True,
        *,
        shard: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(dataset, shuffle, seed, shard=shard)
        self.round_up = round_up
        self.total = math.ceil(self.num_samples / self.count) * self.count if round_up else self.num_samples

    def __iter__(self) -> Iterator[int]:
        order = self.order(self.epoch)
        if order:
            order = (order * math.ceil(self.total / len(order)))[: self.total]
        return iter(order[self.start : self.stop][self.index :: self.count])

    def __len__(self) -> int:
        return max(0, math.ceil((self.total - self.index) / self.count))


@DATA_SAMPLERS.register_module()
class InfiniteSampler(ShardedSampler):
    """An endless stream of epochs, dealt to the processes in turn; for iteration-based training."""

    def __iter__(self) -> Iterator[int]:
        position = self.start + self.index
        epoch, order = -1, []
        while self.stop is None or position < self.stop:
            if position // self.num_samples != epoch:
                epoch = position // self.num_samples
                order = self.order(epoch)
            yield order[position % self.num_samples]
            position += self.count

    def __len__(self) -> int:
        return self.num_samples


@FUNCTIONS.register_module()
def pseudo_collate(samples: Sequence[Any]) -> Any:
    """The samples of a batch with their fields gathered into lists, nothing stacked; MMEngine's default."""
    first = samples[0]
    if isinstance(first, Mapping):
        return {key: pseudo_collate([sample[key] for sample in samples]) for key in first}
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(pseudo_collate(field) for field in zip(*samples, strict=True)))
    if isinstance(first, (list, tuple)):
        return [pseudo_collate(field) for field in zip(*samples, strict=True)]
    return list(samples)


_OURS = ("dataset", "sampler", "batch_sampler", "collate_fn", "shuffle", "generator")


def check_dataloader(cfg: Any, where: str) -> None:
    """Raise ConfigError for what can be wrong in a dataloader's configuration; nothing is built."""
    if isinstance(cfg, DataLoader):
        return
    if not isinstance(cfg, Mapping):
        raise ConfigError(
            f"{where}: {type(cfg).__name__} is not allowed, give dict(dataset=..., batch_size=...) or a DataLoader"
        )
    check_call(DataLoader, {**dict(cfg), "dataset": cfg.get("dataset", [])}, where)
    if "dataset" not in cfg:
        raise ConfigError(f"{where}.dataset: missing, it must be given")
    if isinstance(cfg["dataset"], (Mapping, str)):
        DATASETS.check(cfg["dataset"], f"{where}.dataset")
    elif not hasattr(cfg["dataset"], "__getitem__") and not hasattr(cfg["dataset"], "__iter__"):
        raise ConfigError(f"{where}.dataset: {type(cfg['dataset']).__name__} is no dataset, it has no __getitem__")
    if isinstance(cfg.get("sampler"), (Mapping, str)):
        DATA_SAMPLERS.check(cfg["sampler"], f"{where}.sampler", provided=("dataset", "shard"))
        if "shuffle" in cfg:
            raise ConfigError(f"{where}.shuffle: a sampler is given too, say {where}.sampler.shuffle")
    if isinstance(cfg.get("batch_sampler"), (Mapping, str)):
        DATA_SAMPLERS.check(cfg["batch_sampler"], f"{where}.batch_sampler", provided=("sampler", "batch_size"))
    if isinstance(cfg.get("collate_fn"), (Mapping, str)):
        FUNCTIONS.get(_type_of(cfg["collate_fn"], f"{where}.collate_fn"), f"{where}.collate_fn.type")
    size = cfg.get("batch_size", 1)
    if size is not None and size < 1:
        raise ConfigError(f"{where}.batch_size: {size} is not allowed, give 1 or more")
    if cfg.get("num_workers", 0) < 0:
        raise ConfigError(f"{where}.num_workers: {cfg['num_workers']} is not allowed, give 0 or more")
    if not cfg.get("num_workers", 0):
        for key in ("persistent_workers", "prefetch_factor"):
            if cfg.get(key):
                raise ConfigError(f"{where}.{key}: needs num_workers of 1 or more")


def _type_of(cfg: Any, where: str) -> Any:
    if isinstance(cfg, Mapping) and "type" not in cfg:
        raise ConfigError(f"{where}.type: missing, say which function")
    return cfg["type"] if isinstance(cfg, Mapping) else cfg


def build_dataloader(
    cfg: Any,
    *,
    training: bool,
    seed: int,
    shard: tuple[int, int],
    where: str,
    logger: logging.Logger,
) -> DataLoader[Any]:
    """The DataLoader that a configuration describes, split over processes.

    Args:
        cfg: ``dict(dataset=..., batch_size=..., sampler=dict(...), collate_fn=dict(...), ...)`` or a DataLoader. Of the
            latter, torch's own sequential or random sampler is replaced by a DefaultSampler; any other is kept.
        training: shuffle by default, and give every process as many samples; otherwise no sample is repeated.
        seed: of the order and of the workers.
        shard: (index, count) of this process's part of the data.
        where: the configuration key, for messages.
        logger: is told what was replaced.
    """
    check_dataloader(cfg, where)
    if isinstance(cfg, DataLoader):
        return _adopt(cfg, training, seed, shard, where, logger)
    kwargs = dict(cfg)
    dataset = kwargs.pop("dataset")
    if isinstance(dataset, (Mapping, str)):
        dataset = DATASETS.build(dataset, f"{where}.dataset")
    if hasattr(dataset, "full_init"):
        dataset.full_init()
    collate = kwargs.pop("collate_fn", "pseudo_collate")
    if isinstance(collate, (Mapping, str)):
        arguments = {k: v for k, v in collate.items() if k != "type"} if isinstance(collate, Mapping) else {}
        function = FUNCTIONS.get(_type_of(collate, f"{where}.collate_fn"), f"{where}.collate_fn.type")
        collate = (lambda batch: function(batch, **arguments)) if arguments else function
    kwargs |= {"collate_fn": collate, "generator": torch.Generator()}
    if isinstance(dataset, IterableDataset):
        return DataLoader(dataset, **kwargs)
    sampler = kwargs.pop("sampler", None)
    shuffle = kwargs.pop("shuffle", training)
    if sampler is None:
        sampler = {"type": "DefaultSampler", "shuffle": shuffle}
    if isinstance(sampler, (Mapping, str)):
        spec = dict(sampler) if isinstance(sampler, Mapping) else {"type": sampler}
        extra: dict[str, Any] = {"dataset": dataset, "shard": shard}
        if "seed" not in spec:
            extra["seed"] = seed
        if not training and "round_up" not in spec:
            extra["round_up"] = False
        sampler = DATA_SAMPLERS.build(spec, f"{where}.sampler", **extra)
    if not training and getattr(sampler, "round_up", False):
        raise ConfigError(f"{where}.sampler.round_up: True would count repeated samples in evaluation, leave it out")
    if training and isinstance(sampler, DefaultSampler) and not sampler.round_up and sampler.num_samples % shard[1]:
        raise ConfigError(
            f"{where}.sampler.round_up: False gives {sampler.num_samples} samples unevenly to {shard[1]} processes, "
            "leave it out in training"
        )
    batch_sampler = kwargs.pop("batch_sampler", None)
    if batch_sampler is None:
        return DataLoader(dataset, sampler=sampler, **kwargs)
    size = kwargs.pop("batch_size", 1)
    drop_last = kwargs.pop("drop_last", False)
    if isinstance(batch_sampler, (Mapping, str)):
        batch_sampler = DATA_SAMPLERS.build(
            batch_sampler, f"{where}.batch_sampler", sampler=sampler, batch_size=size, drop_last=drop_last
        )
    return DataLoader(dataset, batch_sampler=batch_sampler, **kwargs)


def _adopt(
    loader: DataLoader[Any], training: bool, seed: int, shard: tuple[int, int], where: str, logger: logging.Logger
) -> DataLoader[Any]:
    """A DataLoader that the user built, split over processes where torch's own sampler shows that nobody has done so."""
    if isinstance(loader.dataset, IterableDataset):
        if shard[1] > 1:
            logger.warning(f"{where}: an IterableDataset is not split over processes here, it must do so itself")
        return loader
    plain = type(loader.sampler) in (SequentialSampler, RandomSampler) and type(loader.batch_sampler) is BatchSampler
    if not plain or getattr(loader.sampler, "replacement", False):
        if shard[1] > 1:
            logger.info(f"{where}: keeps its {type(loader.sampler).__name__}, which must split the data over processes")
        return loader
    shuffle = type(loader.sampler) is RandomSampler
    sampler = DefaultSampler(cast(Sized, loader.dataset), shuffle, seed, round_up=training, shard=shard)
    if shard[1] > 1:
        logger.info(
            f"{where}: the DataLoader got a DefaultSampler(shuffle={shuffle}) that splits it over {shard[1]} processes"
        )
    return _rebuilt(loader, batch_size=loader.batch_size, sampler=sampler, drop_last=loader.drop_last)


def _rebuilt(loader: DataLoader[Any], **sampling: Any) -> DataLoader[Any]:
    """A DataLoader like ``loader`` with other sampling."""
    return DataLoader(
        loader.dataset,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator or torch.Generator(),
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        pin_memory_device=loader.pin_memory_device,
        in_order=loader.in_order,
        **sampling,
    )


class _Rest(Sampler[list[int]]):
    """What is left of a batch sampler's iteration."""

    def __init__(self, batches: Iterator[list[int]], stop: int | None) -> None:
        self.batches, self.stop = batches, stop

    def __iter__(self) -> Iterator[list[int]]:
        for count, batch in enumerate(self.batches):
            if count == self.stop:
                return
            yield batch


class TrainData:
    """The batches of the training set in windows of several, from any position of any epoch.

    No sample is read that does not come before ``stop``, and none that lies before ``start``.

    Args:
        loader: from ``build_dataloader``.
        accumulate: micro-batches per window.
        seed: of the workers.

    Attributes:
        epoch_rng: the process's random state when the epoch began, for samplers of other kinds that draw from it; part of
            what a checkpoint must hold.
    """

    def __init__(self, loader: DataLoader[Any], accumulate: int, seed: int) -> None:
        self.loader, self.accumulate, self.seed = loader, accumulate, seed
        self.epoch_rng: dict[str, Any] | None = None
        self.infinite = isinstance(loader.sampler, InfiniteSampler)

    @property
    def num_batches(self) -> int | None:
        """Batches of one epoch on this process; None when there is no end, or none that is known."""
        try:
            return None if self.infinite else len(self.loader)
        except TypeError:
            return None

    @property
    def epoch_length(self) -> int | None:
        """Windows of one epoch."""
        return None if self.num_batches is None else math.ceil(self.num_batches / self.accumulate)

    def windows(self, epoch: int, start: int = 0, stop: int | None = None) -> Iterator[list[Any]]:
        """The windows of an epoch from number ``start`` up to ``stop``; the last of the epoch may be shorter."""
        loader = self._positioned(epoch, start * self.accumulate, None if stop is None else stop * self.accumulate)
        window: list[Any] = []
        for batch in loader:
            window.append(batch)
            if len(window) == self.accumulate:
                yield window
                window = []
        if window:
            yield window

    def _positioned(self, epoch: int, start: int, stop: int | None) -> DataLoader[Any]:
        loader = self.loader
        if loader.generator is not None:
            # Workers draw their seeds from it; the process's own generator is left to the model.
            loader.generator.manual_seed(self.seed + 1_000_003 * (epoch + 1) + get_rank())
        for sampler in (loader.sampler, loader.batch_sampler):
            set_epoch = getattr(sampler, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(epoch)
        if isinstance(loader.dataset, IterableDataset):
            return cast(DataLoader[Any], _Tail(loader, start, stop))
        if isinstance(loader.sampler, ShardedSampler) and type(loader.batch_sampler) is BatchSampler:
            assert loader.batch_size is not None
            stride = loader.batch_size * loader.sampler.count
            loader.sampler.set_span(start * stride, None if stop is None else stop * stride)
            return loader
        if start == 0:
            self.epoch_rng = rng_state()
            if stop is None:
                return loader
        batches = iter(cast(BatchSampler, loader.batch_sampler))
        if start > 0 and self.epoch_rng is not None:
            # Let the sampler choose the order it chose when the epoch began, then go on as if it had not been asked.
            now = rng_state()
            load_rng_state(self.epoch_rng)
            for _ in range(start):
                next(batches, None)
            load_rng_state(now)
        return _rebuilt(loader, batch_sampler=_Rest(batches, None if stop is None else stop - start))


class _Tail:
    """The batches of a stream from number ``start`` to ``stop``; a stream cannot be entered in the middle, so it is read."""

    def __init__(self, loader: DataLoader[Any], start: int, stop: int | None) -> None:
        self.loader, self.start, self.stop = loader, start, stop

    def __iter__(self) -> Iterator[Any]:
        for count, batch in enumerate(self.loader):
            if count == self.stop:
                return
            if count >= self.start:
                yield batch
