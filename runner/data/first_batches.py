"""Read the first batches of evaluation data apart from all other passes over them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from ...core.random.generators import kept_random_state
from .readers import Feed
from .samplers import follows_span
from .user_loaders import batch_size, goes_its_own_way, name_of, resampled


def only_once(loader: Any) -> str | None:
    """Say why the data might not begin again after a trial; None if they are read by index."""
    if goes_its_own_way(loader):
        return f"{name_of(loader)} may give each batch only once"
    if isinstance(loader.dataset, IterableDataset):
        return f"{type(loader.dataset).__name__} is a stream, which may give each sample only once"
    return None


def parts_of(loader: Any) -> list[object]:
    """The user's objects that this process calls to read batches; a worker has its own copy of the dataset."""
    own = [loader.sampler, loader.batch_sampler]
    return own if loader.num_workers else [*own, loader.dataset, loader.collate_fn]


@contextmanager
def first_batches(
    loader: DataLoader[Any], count: int, *, seed: int, epoch: int, shard: tuple[int, int]
) -> Iterator[Iterator[Any]]:
    """Context that gives the first ``count`` batches of an epoch; nothing is read beyond them.

    If the loader has workers, one reads the batches, and ends with the context.

    Args:
        loader: the DataLoader, whose own workers are not used.
        seed, epoch: see ``Feed.batches``.
        shard: (index, count) of the data shard that this process reads.
    """
    feed = Feed(_apart(loader), shard)
    stop = count * (batch_size(loader) or 1) * loader.sampler.count if feed.by_position else count  # type: ignore[attr-defined]
    batches = feed.batches(seed, epoch, 0, stop)
    try:
        yield batches
    finally:
        close = getattr(batches, "close", None)
        if close is not None:
            close()
        feed.close()


def _apart(loader: DataLoader[Any]) -> DataLoader[Any]:
    """A copy that starts workers of its own, with a copy of a sampler that has a span."""
    changes: dict[str, Any] = {"num_workers": min(loader.num_workers, 1), "persistent_workers": False}
    changes["pin_memory"] = False  # one thread less
    sampler, batches = loader.sampler, loader.batch_sampler
    if type(batches) in (BatchSampler, type(None)) and follows_span(sampler):
        changes["sampler"] = copy.copy(sampler)
        if batches is not None:
            size, drop_last = batches.batch_size, batches.drop_last  # type: ignore[attr-defined]
            changes["batch_sampler"] = BatchSampler(changes["sampler"], size, drop_last)
    return resampled(loader, **changes)


# A small batch of a run's data, read before anything else is, for whoever needs the shapes in it.


_SAMPLES = 2


def example_batch(run: Any, names: Sequence[str]) -> Any:
    """Return the first samples of the first of these dataloaders that can be read by index, collated; None without any.

    Training draws the same random numbers as if nothing had been read.

    Args:
        run: the runner, which has the dataloaders.
        names: of its attributes.
    """
    for name in names:
        loader: Any = getattr(run, name)
        if isinstance(loader, DataLoader) and only_once(loader) is None:
            dataset: Any = loader.dataset
            with kept_random_state(torch.device("cpu")):
                samples = [dataset[index] for index in range(min(_SAMPLES, len(dataset)))]
                return loader.collate_fn(samples)
    return None
