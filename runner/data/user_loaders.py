"""DataLoaders and other sources of batches from the user: split over processes, with their class and methods kept."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any, cast

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from ...core.base.errors import ConfigError
from ...core.torch_compat.torch_private import KEPT_ITERATOR, LOADER_ITERATOR, MAKE_ITERATOR
from .samplers import DefaultSampler, DividedSampler, ShardedSampler, chain_of, check_is_told, dealt_by, divided_sampler
from .streams.divided_streams import DividedStream, KeptPasses, divided, original, undivided
from .streams.hugging_face import why_read_again

Batches = Iterable[Any] | Callable[[], Iterable[Any]]
"""A source of batches: a DataLoader or another iterable, or a function that returns one."""


def adopt(
    loader: DataLoader[Any],
    training: bool,
    seed: int,
    shard: tuple[int, int],
    asked: bool | None,
    where: str,
    logger: logging.Logger,
) -> Any:
    """Return the user's DataLoader, split over processes; ``asked`` is the ``shard`` beside it, None without one.

    Raises:
        ConfigError: nobody knows whether it splits the data itself.
    """
    sampler, batches = sampler_of(loader), loader.batch_sampler
    if _holds_on_to_itself(loader):  # and is read as it is, because no copy would be
        return loader if divides(sampler) else divided(loader, shard, asked, training, where, logger)
    if isinstance(loader.dataset, IterableDataset):
        dataset = divided(loader.dataset, shard, asked, training, where, logger)
        return loader if dataset is loader.dataset else resampled(loader, dataset=dataset)
    if not _samples_by_default(loader):
        batches, sampler = divided_samplers(batches, sampler, shard, asked, training, where, logger)
        same = batches is loader.batch_sampler and sampler is sampler_of(loader)
        return loader if same else resampled(loader, sampler=sampler, batch_sampler=batches)
    shuffle = not isinstance(sampler, SequentialSampler)
    own = DefaultSampler(cast(Sized, loader.dataset), shuffle, seed, round_up=training, shard=shard)
    if shard[1] > 1:
        logger.info(
            f"{where}: the DataLoader got a DefaultSampler(shuffle={shuffle}) that splits it over {shard[1]} processes"
        )
    elif shuffle and getattr(sampler, "generator", None) is not None:
        logger.info(f"{where}: the DataLoader got a DefaultSampler(shuffle=True), which follows the run's seed")
    return resampled(loader, sampler=own, batch_sampler=None if batches is None else _again(batches, own))


def sampler_of(loader: Any) -> Any:
    """Return a loader's sampler; a batch sampler of the user's holds it itself, and the loader only a placeholder."""
    return getattr(getattr(loader, "batch_sampler", None), "sampler", getattr(loader, "sampler", None))


def is_divided(loader: Any) -> bool:
    """True if all processes read the same items of a stream or a sampler, and each keeps its own."""
    parts = (loader, getattr(loader, "dataset", None))
    return divided_sampler(loader) is not None or any(isinstance(part, DividedStream) for part in parts)


def deals_batches(loader: Any) -> bool:
    """True if processes have whole batches in turn: of a list of batches, of a source of its own, and of a batch sampler."""
    if not isinstance(loader, DataLoader) or isinstance(loader.batch_sampler, DividedSampler):
        return True
    return loader.batch_size is None and loader.batch_sampler is None


def divides(sampler: Any) -> bool:
    """True if a sampler, or one inside it, deals the data to the processes itself."""
    return any(dealt_by(part) is not None for part in chain_of(sampler))


def divided_samplers(
    batches: Any,
    sampler: Any,
    shard: tuple[int, int],
    asked: bool | None,
    training: bool,
    where: str,
    logger: logging.Logger,
) -> tuple[Any, Any]:
    """Return a batch sampler (or None) and the sampler inside it, divided over the processes if they do not do so.

    Args:
        batches, sampler: those of the user; torch's own ones are known to give all processes the same.
        asked: the ``shard`` of the configuration, None if it has none.

    Raises:
        ConfigError: nobody knows whether a class of the user's divides, or it keeps a sampler where it is not told the epoch.
    """
    of_torch = batches is None or type(batches).__module__ in TORCHS_SAMPLERS
    check_is_told(batches, where)
    outer = sampler if of_torch else batches
    if shard[1] == 1 or asked is False or divides(batches) or divides(sampler):
        return batches, sampler
    if asked is None and type(outer).__module__ not in TORCHS_SAMPLERS:
        raise undivided(where, f"what its {type(outer).__name__} chooses", shard[1])
    own = DividedSampler(outer, shard, training)
    logger.info(
        f"{where}: each of the {shard[1]} processes keeps its own part of what its {type(outer).__name__} chooses"
    )
    if not of_torch:
        return own, sampler
    return (None if batches is None else _again(batches, own)), own


def _again(batches: Any, sampler: Any) -> BatchSampler:
    return BatchSampler(sampler, batches.batch_size, batches.drop_last)


# torchdata has its own RandomSampler and BatchSampler, which keep a state.
TORCHS_SAMPLERS = ("torch.utils.data.sampler", "torchdata.stateful_dataloader.sampler")


def _samples_by_default(loader: DataLoader[Any]) -> bool:
    """True if the samplers are those of ``shuffle`` and ``batch_size``: every sample of the dataset once, in turn."""
    sampler = sampler_of(loader)
    kind, batches = (
        type(part).__name__ if type(part).__module__ in TORCHS_SAMPLERS else None
        for part in (sampler, loader.batch_sampler)
    )
    once = kind == "SequentialSampler" or (kind == "RandomSampler" and not sampler.replacement)
    is_whole = once and length_of(sampler.data_source) == length_of(sampler) == length_of(loader.dataset)
    return is_whole and (batches == "BatchSampler" or loader.batch_sampler is None)


def _holds_on_to_itself(loader: DataLoader[Any]) -> bool:
    """True if an attribute refers to this loader object, so that a copy would not be the one that is read."""
    return any(
        isinstance(part, LOADER_ITERATOR)
        or getattr(part, "__self__", None) is loader
        or any(value is loader for value in getattr(part, "__dict__", {}).values())
        for name, part in vars(loader).items()
        if name != KEPT_ITERATOR
    )


def resampled(loader: DataLoader[Any], **sampling: Any) -> DataLoader[Any]:
    """Return a copy of ``loader``, with its class and methods, and its own generator for the workers' seeds.

    Args:
        loader: the original, which is not changed.
        sampling: attributes to replace, such as ``sampler`` and ``batch_sampler``.
    """
    copied = copy.copy(loader)
    # torch does not allow the samplers of a built loader to be set.
    vars(copied).update(sampling, generator=torch.Generator(), **{KEPT_ITERATOR: None})
    return copied


def goes_its_own_way(loader: Any) -> bool:
    """True if the batches may differ from those of the sampler, because the class overrides the methods of reading."""
    if not isinstance(loader, DataLoader):
        return True
    own = (getattr(type(loader), name) is not getattr(DataLoader, name) for name in _READING)
    return any(own) and not _only_counts(loader)


_READING = ("__iter__", "__len__", MAKE_ITERATOR)


def _only_counts(loader: DataLoader[Any]) -> bool:
    """True if torchdata's loader has a dataset and a sampler without state: its state is only a number of batches."""
    return (
        type(loader).__module__ == "torchdata.stateful_dataloader.stateful_dataloader"
        and not isinstance(loader.dataset, IterableDataset)
        and not keeps_position(loader.dataset)
        and isinstance(loader.sampler, ShardedSampler)
        and type(loader.batch_sampler) in (BatchSampler, type(None))
    )


def batch_size(dataloader: Any) -> int | None:
    """Return the samples per batch of a dataloader, or of another source of batches; None if unknown."""
    for part in (dataloader, getattr(dataloader, "batch_sampler", None)):
        size = getattr(part, "batch_size", None)
        if isinstance(size, int):
            return size
    return None


def say_how_it_resumes(loader: Any, where: str, logger: logging.Logger) -> None:
    """Log how a custom loader resumes in the middle of an epoch."""
    if not goes_its_own_way(loader):
        return
    if keeps_position(loader):
        how = "continues from its state_dict in the checkpoint, on the same number of processes"
    else:
        why = f"{why}: " if (why := why_not_by_state(loader)) else ""
        how = f"{why}reads it again from its beginning, which is exact if it gives the same batches on the same number of processes"
    logger.info(f"{where}: resuming in the middle of an epoch of {name_of(loader)} {how}")


# Sources of batches that are not a DataLoader


def is_batch_list(loader: Any) -> bool:
    """True for a sequence of batches, which can be split over processes."""
    return isinstance(loader, Sequence) and not isinstance(loader, (str, bytes))


def gives_batches(loader: Any) -> bool:
    """True for an iterable, and for a function, which may return one."""
    return not inspect.isclass(loader) and (hasattr(loader, "__iter__") or callable(loader))


def from_elsewhere(
    source: Any, training: bool, shard: tuple[int, int], asked: bool | None, where: str, logger: logging.Logger
) -> Iterable[Any]:
    """Return a source of batches: a list is split over processes; anything else as ``asked``.

    Raises:
        ConfigError: nobody knows whether it gives every process its own batches.
    """
    if is_batch_list(source):
        sampler = DefaultSampler(source, shuffle=False, round_up=training, shard=shard)
        return DataLoader(source, batch_size=None, sampler=sampler, collate_fn=_as_it_is, generator=torch.Generator())
    if asked is None and shard[1] > 1:
        raise undivided(where, name_of(source), shard[1])
    batches = source if hasattr(source, "__iter__") else FromFunction(source, where)
    return DividedStream(batches, shard, training) if asked and shard[1] > 1 else batches


def keeps_position(loader: Any) -> bool:
    """True if the object's own state determines its next batch; for the state of some streams of Hugging Face's it does not."""
    has_state = all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))
    return has_state and why_not_by_state(loader) is None


def why_not_by_state(loader: Any) -> str | None:
    """Return why the state of a stream, or of a loader's, does not determine its next sample; None if nothing is known."""
    dataset = getattr(loader, "dataset", None)
    if isinstance(dataset, DividedStream):
        dataset = dataset.dataset
    if isinstance(dataset, KeptPasses):
        return why_read_again(original(dataset))
    return why_read_again(original(loader if dataset is None else dataset), getattr(loader, "num_workers", 0))


def length_of(data: Any) -> int | None:
    """Return ``len(data)``; None if it has none, or does not know it."""
    try:
        return len(data)
    except TypeError:
        return None


def name_of(loader: Any) -> str:
    """Return the name of its class, or of the function; of a stream's loader that was made here, the stream's."""
    if isinstance(loader, DividedStream) or getattr(loader, "is_made_here", False) is True:
        loader = original(loader)
    function = loader.function if isinstance(loader, FromFunction) else loader
    return getattr(function, "__qualname__", None) or type(function).__name__


class FromFunction:
    """The batches that a function returns, called again for every pass; it has no ``len``.

    Args:
        function: takes no argument; a generator function, or one that returns an iterable.
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
