"""A small batch of training data, read before training begins, for whoever needs the shapes in it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from ...core.random_state import kept_random_state
from .first_batches import only_once

_SAMPLES = 2


def example_batch(loader: Any) -> Callable[[], Any] | None:
    """Return a function that reads the first samples and collates them; None if that may take them from training."""
    if not isinstance(loader, DataLoader) or only_once(loader) is not None:
        return None
    return partial(_read, loader)


def _read(loader: DataLoader[Any]) -> Any:
    """Return the batch; training draws the same random numbers as if nothing had been read."""
    dataset: Any = loader.dataset
    with kept_random_state(torch.device("cpu")):
        samples = [dataset[index] for index in range(min(_SAMPLES, len(dataset)))]
        return loader.collate_fn(samples)
