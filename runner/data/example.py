"""A small batch of a run's data, read before anything else is, for whoever needs the shapes in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from ...core.random_state import kept_random_state
from .first_batches import only_once

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
