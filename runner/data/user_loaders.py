"""DataLoaders that the user built: split over processes, with the class and the methods that they have."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any, cast

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from ...core.errors import ConfigError
from ...core.torch_private import KEPT_ITERATOR, LOADER_ITERATOR, MAKE_ITERATOR
from .samplers import DefaultSampler, ShardedSampler

Batches = Iterable[Any] | Callable[[], Iterable[Any]]
"""What gives batches: a DataLoader or another iterable, or a function that gives one."""


def adopt(
    loader: DataLoader[Any], training: bool, seed: int, shard: tuple[int, int], where: str, logger: logging.Logger
) -> DataLoader[Any]:
    """A DataLoader that the user built, split over processes where torch's own sampler shows that nobody has done so."""
    if isinstance(loader.dataset, IterableDataset):
        if shard[1] > 1:
            logger.warning(f"{where}: an IterableDataset is not split over processes here, it must do so itself")
        return loader
    if not _is_plain(loader) or _holds_on_to_itself(loader):
        if shard[1] > 1 and not isinstance(getattr(loader.batch_sampler, "sampler", loader.sampler), ShardedSampler):
            name = "" if type(loader) is DataLoader else f"{type(loader).__name__} "
            own_batches = type(loader.batch_sampler) not in (BatchSampler, type(None))
            kept = type(loader.batch_sampler if own_batches else loader.sampler).__name__
            rest = "" if training else ", or samples are counted several times"
            logger.warning(f"{where}: {name}keeps its {kept}, which must split the data over processes itself{rest}")
        return loader
    shuffle = not isinstance(loader.sampler, SequentialSampler)
    sampler = DefaultSampler(cast(Sized, loader.dataset), shuffle, seed, round_up=training, shard=shard)
    if shard[1] > 1:
        logger.info(
            f"{where}: the DataLoader got a DefaultSampler(shuffle={shuffle}) that splits it over {shard[1]} processes"
        )
    elif shuffle and getattr(loader.sampler, "generator", None) is not None:
        logger.info(f"{where}: the DataLoader got a DefaultSampler(shuffle=True), which follows the run's seed")
    if loader.batch_sampler is None:
        return resampled(loader, sampler=sampler)
    batches = BatchSampler(sampler, cast(int, loader.batch_size), loader.drop_last)
    return resampled(loader, sampler=sampler, batch_sampler=batches)


# torchdata has a RandomSampler and a BatchSampler of its own, which keep a state.
_PLAIN_SAMPLERS = ("torch.utils.data.sampler", "torchdata.stateful_dataloader.sampler")


def _is_plain(loader: DataLoader[Any]) -> bool:
    """Whether the samplers are what ``shuffle`` and ``batch_size`` make: every sample of the dataset once, in turn."""
    sampler: Any = loader.sampler
    kind, batches = (
        type(part).__name__ if type(part).__module__ in _PLAIN_SAMPLERS else None
        for part in (sampler, loader.batch_sampler)
    )
    once = kind == "SequentialSampler" or (
        kind == "RandomSampler" and not sampler.replacement and sampler.num_samples == length_of(loader.dataset)
    )
    return once and (batches == "BatchSampler" or loader.batch_sampler is None)


def _holds_on_to_itself(loader: DataLoader[Any]) -> bool:
    """Whether an attribute reads this very loader, so that a copy of it would not be read."""
    return any(
        isinstance(part, LOADER_ITERATOR)
        or getattr(part, "__self__", None) is loader
        or any(value is loader for value in getattr(part, "__dict__", {}).values())
        for name, part in vars(loader).items()
        if name != KEPT_ITERATOR
    )


def resampled(loader: DataLoader[Any], **sampling: Any) -> DataLoader[Any]:
    """A copy of ``loader``, with its class and methods, and a generator of its own for the workers' seeds.

    Args:
        loader: stays as it is.
        sampling: ``sampler`` and ``batch_sampler``, where they are others.
    """
    copied = copy.copy(loader)
    # torch refuses to set the samplers of a loader that is built.
    vars(copied).update(sampling, generator=torch.Generator(), **{KEPT_ITERATOR: None})
    return copied


def goes_its_own_way(loader: Any) -> bool:
    """Whether batches need not be those of the sampler, one after the other, because the class has its own methods."""
    if not isinstance(loader, DataLoader):
        return True
    own = (getattr(type(loader), name) is not getattr(DataLoader, name) for name in _READING)
    return any(own) and not _only_counts(loader)


_READING = ("__iter__", "__len__", MAKE_ITERATOR)


def _only_counts(loader: DataLoader[Any]) -> bool:
    """Whether it is torchdata's, over a dataset and a sampler without a state: it saves a number of batches, no more."""
    return (
        type(loader).__module__ == "torchdata.stateful_dataloader.stateful_dataloader"
        and not isinstance(loader.dataset, IterableDataset)
        and not keeps_place(loader.dataset)
        and isinstance(loader.sampler, ShardedSampler)
        and type(loader.batch_sampler) in (BatchSampler, type(None))
    )


def batch_size(dataloader: Any) -> int | None:
    """Samples per batch of a built dataloader, or of what gives batches in its place; None when nobody knows."""
    for part in (dataloader, getattr(dataloader, "batch_sampler", None)):
        size = getattr(part, "batch_size", None)
        if isinstance(size, int):
            return size
    return None


def say_how_it_resumes(loader: Any, where: str, logger: logging.Logger) -> None:
    """Log what resuming in the middle of an epoch does with a loader that goes its own way."""
    if not goes_its_own_way(loader):
        return
    if keeps_place(loader):
        how = "goes on where its state_dict says, which is saved in checkpoints, among as many processes as there were"
    else:
        how = "reads it again from its beginning, and is exact if that gives the same batches on as many processes"
    logger.info(f"{where}: resuming in the middle of an epoch of {name_of(loader)} {how}")


# Batches that no DataLoader makes


def is_batch_list(loader: Any) -> bool:
    """Whether it is a sequence of batches, which can be dealt out."""
    return isinstance(loader, Sequence) and not isinstance(loader, (str, bytes))


def gives_batches(loader: Any) -> bool:
    """Whether it can be iterated over, or is a function that gives something that can."""
    return not inspect.isclass(loader) and (hasattr(loader, "__iter__") or callable(loader))


def from_elsewhere(
    source: Any, training: bool, shard: tuple[int, int], where: str, logger: logging.Logger
) -> Iterable[Any]:
    """What gives batches: a list is dealt out over processes; anything else is taken as it is, and the log says what of."""
    if is_batch_list(source):
        sampler = DefaultSampler(source, shuffle=False, round_up=training, shard=shard)
        return DataLoader(source, batch_size=None, sampler=sampler, collate_fn=_as_it_is, generator=torch.Generator())
    if shard[1] > 1:
        own = "train on what is its own" if training else "evaluate what is its own, or it is counted several times"
        logger.warning(
            f"{where}: {name_of(source)} is not split over the {shard[1]} processes here, it must give each of them "
            f"batches to {own}"
        )
    return source if hasattr(source, "__iter__") else FromFunction(source, where)


def keeps_place(loader: Any) -> bool:
    """Whether its own state says which batch comes next."""
    return all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))


def length_of(data: Any) -> int | None:
    """Its ``len``; None for what has none, or does not know."""
    try:
        return len(data)
    except TypeError:
        return None


def name_of(loader: Any) -> str:
    """Its class, or the name of the function."""
    function = getattr(loader, "function", loader) if isinstance(loader, FromFunction) else loader
    return getattr(function, "__qualname__", None) or type(function).__name__


class FromFunction:
    """What a function gives, called anew for every pass; ``len`` is unknown.

    Args:
        function: of no arguments; a generator function, or one that returns something to iterate over.
        where: the configuration key, for messages.
    """

    def __init__(self, function: Callable[[], Iterable[Any]], where: str) -> None:
        self.function, self._where = function, where

    def __iter__(self) -> Iterator[Any]:
        given = self.function()
        if not isinstance(given, Iterable):
            raise ConfigError(
                f"{self._where}: {name_of(self)} gave {type(given).__name__}, it must give something to iterate over"
            )
        return iter(given)


def _as_it_is(batch: Any) -> Any:
    return batch
