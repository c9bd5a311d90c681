"""DataLoaders that the user built: split over processes, with the class and the methods that they have."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sized
from typing import Any, cast

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from .samplers import DefaultSampler


def adopt(
    loader: DataLoader[Any], training: bool, seed: int, shard: tuple[int, int], where: str, logger: logging.Logger
) -> DataLoader[Any]:
    """A DataLoader that the user built, split over processes where torch's own sampler shows that nobody has done so."""
    if isinstance(loader.dataset, IterableDataset):
        if shard[1] > 1:
            logger.warning(f"{where}: an IterableDataset is not split over processes here, it must do so itself")
        return loader
    if not _is_plain(loader):
        if shard[1] > 1:
            logger.warning(
                f"{where}: keeps its {type(loader.sampler).__name__}, which must split the data over processes itself"
            )
        return loader
    shuffle = type(loader.sampler) is RandomSampler
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


def _is_plain(loader: DataLoader[Any]) -> bool:
    """Whether the sampler is what torch makes of ``shuffle``: every sample of the dataset once."""
    sampler = loader.sampler
    once = type(sampler) is SequentialSampler or (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and sampler.num_samples == len(cast(Sized, loader.dataset))
    )
    return once and type(loader.batch_sampler) in (BatchSampler, type(None))


def resampled(loader: DataLoader[Any], **sampling: Any) -> DataLoader[Any]:
    """A copy of ``loader``, with its class and methods, and a generator of its own for the workers' seeds.

    Args:
        loader: stays as it is.
        sampling: ``sampler`` and ``batch_sampler``, where they are others.
    """
    copied = copy.copy(loader)
    # torch refuses to set the samplers of a loader that is built.
    vars(copied).update(sampling, generator=torch.Generator(), _iterator=None)
    return copied


def goes_its_own_way(loader: Any) -> bool:
    """Whether batches need not be those of the sampler, one after the other, because the class has its own methods."""
    return not isinstance(loader, DataLoader) or any(
        getattr(type(loader), name) is not getattr(DataLoader, name)
        for name in ("__iter__", "__len__", "_get_iterator")
    )
