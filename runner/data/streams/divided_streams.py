"""Streams of Hugging Face's datasets: divided over the processes, none of whose samples may be read twice."""

from __future__ import annotations

import importlib
import logging
import sys
from typing import Any

from ....core.errors import ConfigError


def divided(dataset: Any, shard: tuple[int, int], where: str, logger: logging.Logger) -> Any:
    """Return the part of a stream that this process reads; any other IterableDataset divides itself, and is returned as it is.

    A stream whose number of shards is a multiple of the number of processes is divided by shards; of another one, every process
    reads all samples and keeps its own.

    Raises:
        ConfigError: it was divided already, for another number of processes or for another one of them.
    """
    kind = getattr(sys.modules.get("datasets"), "IterableDataset", None)
    if kind is None or not isinstance(dataset, kind):
        return dataset
    index, count = shard
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
