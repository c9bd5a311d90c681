"""Call ``set_epoch`` of datasets, samplers and dataloaders at the beginning of an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def tell_epoch(part: Any, epoch: int) -> None:
    """Call ``set_epoch`` of a dataset, a sampler or a loader, if it has one."""
    set_epoch = getattr(part, "set_epoch", None)
    if set_epoch is not None:
        set_epoch(epoch)


def tell_loader_epoch(loader: Any, epoch: int) -> None:
    """Call ``set_epoch`` of a loader, its dataset and its samplers, where they have one."""
    batches = getattr(loader, "batch_sampler", None)
    # A custom batch sampler holds the sampler itself, and the loader only a placeholder.
    sampler = getattr(batches, "sampler", getattr(loader, "sampler", None))
    for part in (loader, getattr(loader, "dataset", None), *chain_of(sampler), batches):
        tell_epoch(part, epoch)


def chain_of(part: Any) -> Iterator[Any]:
    """Yield a sampler, the one inside it, and so on."""
    while part is not None:
        yield part
        part = getattr(part, "sampler", None)
