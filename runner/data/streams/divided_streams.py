"""Streams and other sources of samples or batches, divided over the processes: none of them may be read twice."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset

from ....core.base.errors import ConfigError

SHARD = "shard"
"""Key of a dataloader: True: divide its data over the processes; False: every process has its own data already."""


def undivided(where: str, name: str, count: int, loader: str = "") -> ConfigError:
    """Return the error for data of which nobody knows whether they divide themselves over the processes."""
    return ConfigError(
        f"{where}.shard: missing, every one of the {count} processes may get all of {name}; {loader}shard=True lets each keep its "
        f"own part, shard=False says that {name} gives every process its own"
    )


def divided(
    dataset: Any, shard: tuple[int, int], asked: bool | None, training: bool, where: str, logger: logging.Logger
) -> Any:
    """Return the part of a stream, or of another source, that this process reads.

    A stream of Hugging Face's datasets whose number of shards is a multiple of the number of processes is divided by shards; of
    another one, and of any other stream, every process reads all samples and keeps its own.

    Args:
        dataset: the stream.
        shard: (index, count) of this process's data shard.
        asked: the ``shard`` of the configuration, None if it has none.
        training: give every process equally many samples.
        where: the configuration key, for messages.
        logger: says how it is divided.

    Raises:
        ConfigError: it was divided already, for another number of processes or for another one of them, or it may have been.
    """
    index, count = shard
    kind = getattr(sys.modules.get("datasets"), "IterableDataset", None)
    if asked is False or kind is None or not isinstance(dataset, kind):
        if asked is None and count > 1:
            raise undivided(where, type(dataset).__name__, count)
        return DividedStream(dataset, shard, training) if asked and count > 1 else dataset
    before = getattr(dataset, "_distributed", None)
    if before is not None:
        if (before.rank, before.world_size) != (index, count):
            raise ConfigError(
                f"{where}.dataset: is divided already, as part {before.rank} of {before.world_size}, and this process has to read part "
                f"{index} of {count}; give it whole, without split_dataset_by_node"
            )
        return dataset
    if count == 1:
        return dataset
    shards = getattr(dataset, "num_shards", None)
    if not shards or shards % count:
        logger.info(
            f"{where}.dataset: each of the {count} processes reads all {shards or ''} shards and keeps one sample of {count}; with a "
            f"multiple of {count} shards each would read its own only, as to_iterable_dataset(num_shards={count}) gives"
        )
    split: Any = importlib.import_module("datasets.distributed")
    return split.split_dataset_by_node(dataset, rank=index, world_size=count)


class DividedStream(IterableDataset[Any]):
    """Every ``count``-th item of a source that gives all processes the same items, with its other attributes and methods.

    Args:
        dataset: the source: a stream of samples, or one of batches.
        shard: (index, count) of the items to give.
        fill: give every process equally many: those that have none of the last items repeat the last one.
    """

    def __init__(self, dataset: Any, shard: tuple[int, int], fill: bool) -> None:
        self.dataset, self._shard, self._fill = dataset, shard, fill
        self._read = self._start = 0  # items read; those before a restored state

    def __iter__(self) -> Iterator[Any]:
        index, count = self._shard
        self._read, self._start = self._start, 0
        item = None
        for item in self.dataset:
            self._read += 1
            if (self._read - 1) % count == index:
                yield item
        if self._fill and 0 < self._read % count <= index:
            yield item

    def __len__(self) -> int:
        index, count = self._shard
        return (len(self.dataset) + count - 1 - (0 if self._fill else index)) // count

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # not there yet while it is unpickled
            raise AttributeError(name)
        value = getattr(self.dataset, name)
        return {"state_dict": self._state, "load_state_dict": self._load}.get(name, value)

    def _state(self) -> dict[str, Any]:
        return {"dataset": self.dataset.state_dict(), "read": self._read}

    def _load(self, state: dict[str, Any]) -> None:
        self.dataset.load_state_dict(state["dataset"])
        self._start = state["read"]
