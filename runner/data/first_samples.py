"""``num_batch_per_epoch`` of a dataloader: epochs of a few batches, for trying out a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from ...core.errors import ConfigError

KEY = "num_batch_per_epoch"


class FirstSamples(Dataset[Any]):
    """The first samples of a dataset, with the dataset's other attributes and methods."""

    def __init__(self, dataset: Any, length: int) -> None:
        self.dataset = dataset
        self._length = min(length, len(dataset))

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __len__(self) -> int:
        return self._length

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # not there yet while it is unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)


def check_limit(cfg: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError if the number of batches cannot be honoured."""
    limit = cfg.get(KEY)
    if limit is None:
        return
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        raise ConfigError(f"{where}.{KEY}: {limit!r} is not allowed, give 1 or more")
    for key in ("sampler", "batch_sampler"):
        if cfg.get(key) is not None and not isinstance(cfg[key], (Mapping, str, type)):
            raise ConfigError(f"{where}.{KEY}: has no effect on a {key} that is already built, give dict(type=...)")


def limited(dataset: Any, limit: int | None, cfg: Mapping[str, Any], shards: int, where: str) -> Any:
    """Return as much of the dataset as ``limit`` batches of each of ``shards`` data shards need; None: all of it."""
    if limit is None:
        return dataset
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise ConfigError(f"{where}.{KEY}: needs a dataset with a length, {type(dataset).__name__} has none")
    return FirstSamples(dataset, limit * int(cfg.get("batch_size", 1)) * shards)
