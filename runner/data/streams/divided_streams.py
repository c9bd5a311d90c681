"""Streams and other sources of samples or batches, divided over the processes: none of them may be read twice."""

from __future__ import annotations

import copy
import enum
import importlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset

from ....core.base.errors import ConfigError
from ....core.comm.topology import divided_by_its_reader
from ..samplers import tell_epoch
from .hugging_face import has_no_seed, is_of_hugging_face, why_not_by_shards

SHARD = "shard"
"""Key of a dataloader: True: divide its data over the processes; False: every process has its own data already."""


class _Nothing(enum.Enum):
    """No item or state, where None may be one; it stays the same object in workers that are no forks."""

    NOTHING = enum.auto()


_NONE: Any = _Nothing.NOTHING


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

    A stream of Hugging Face's datasets whose number of shards is a multiple of the number of processes is divided by shards, unless
    it counts the samples of all shards; of another one, and of any other stream, every process reads all samples and keeps its own.

    Args:
        dataset: the stream.
        shard: (index, count) of this process's data shard.
        asked: the ``shard`` of the configuration, None if it has none.
        training: give every process equally many samples.
        where: the configuration key, for messages.
        logger: says how it is divided.

    Raises:
        ConfigError: it was divided already, for another number of processes or for another one of them, or it may have been; or each
            process would have another order.
    """
    index, count = shard
    if is_of_hugging_face(dataset) and (count > 1 or training) and has_no_seed(dataset):
        _say_without_seed(where, count, logger)
    if asked is False or not is_of_hugging_face(dataset):
        if asked is None and count > 1:
            raise undivided(where, type(original(dataset)).__name__, count)
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
    if (operation := why_not_by_shards(dataset, training)) is not None:
        logger.info(
            f"{where}.dataset: each of the {count} processes reads all shards and keeps one sample of {count}, because {operation} gives "
            "other samples of some shards than of all"
        )
        return DividedStream(dataset, shard, training)
    shards = getattr(dataset, "num_shards", None)
    if not shards or shards % count:
        logger.info(
            f"{where}.dataset: each of the {count} processes reads all {shards or ''} shards and keeps one sample of {count}; with a "
            f"multiple of {count} shards each would read its own only, as to_iterable_dataset(num_shards={count}) gives"
        )
    split: Any = importlib.import_module("datasets.distributed")
    return split.split_dataset_by_node(dataset, rank=index, world_size=count)


def _say_without_seed(where: str, count: int, logger: logging.Logger) -> None:
    """Raise ConfigError, or warn on one process, of a stream whose order is drawn without a seed."""
    what = f"{where}.dataset: is shuffled, or interleaved by chance, without a seed (or with one of more than 64 bits), so that"
    if count > 1:
        raise ConfigError(
            f"{what} each of the {count} processes has another order: samples are lost and come twice; give shuffle(seed=...)"
        )
    logger.warning(f"{what} a resumed run has another order: samples are lost and come twice; give shuffle(seed=...)")


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
        # Now, not when the first item is asked for: torchdata takes a state before that.
        self._read, self._start = self._start, 0
        with divided_by_its_reader():
            items = iter(self.dataset)
        return self._own(items)

    def _own(self, items: Iterator[Any]) -> Iterator[Any]:
        index, count = self._shard
        item = _NONE
        while True:
            with divided_by_its_reader():
                following = next(items, _NONE)
            if following is _NONE:
                break
            item = following
            self._read += 1
            if (self._read - 1) % count == index:
                yield item
        if self._fill and 0 < self._read % count <= index and item is not _NONE:  # none: restored at the end
            yield item

    def __len__(self) -> int:
        index, count = self._shard
        return (len(self.dataset) + count - 1 - (0 if self._fill else index)) // count

    def __getattr__(self, name: str) -> Any:
        # The dataset is not there yet while this is unpickled; how it is copied is its own (Python 3.10 asks for __getstate__).
        if name == "dataset" or name.startswith("__"):
            raise AttributeError(name)
        value = getattr(self.dataset, name)
        return {"state_dict": self._state, "load_state_dict": self._load}.get(name, value)

    def _state(self) -> dict[str, Any]:
        return {"dataset": self.dataset.state_dict(), "read": self._read}

    def _load(self, state: dict[str, Any]) -> None:
        self.dataset.load_state_dict(state["dataset"])
        self._read = self._start = state["read"]


class KeptPasses(IterableDataset[Any]):
    """A stream with a state of its own, with its other attributes and methods; the state also says whether a pass has ended.

    Some streams begin anew from their state at the end of a pass, others end once more. Both go on rightly: a pass that had
    ended gives nothing after resuming, in a worker as well, and the next one begins anew. Of workers that are kept, each
    is told the epoch. Some streams, Hugging Face's among them, tell where they were restored only after the next sample; a
    worker may be asked before it has read one.

    Args:
        dataset: the stream.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._stage, self._told = "begin", -1
        self._loaded: Any = _NONE  # until a pass begins
        self._restored: Any = _NONE  # until the first sample
        # This tensor is shared with the workers.
        self._epoch = torch.full((), -1, dtype=torch.int64, device="cpu").share_memory_()  # type: ignore[no-untyped-call]

    def __iter__(self) -> Iterator[Any]:
        loaded, self._loaded = self._loaded, _NONE
        goes_on = loaded is not _NONE and self._stage == "within"
        if loaded is not _NONE and not goes_on:
            if next(iter(self.dataset), _NONE) is not _NONE:
                self.dataset.load_state_dict(loaded)
            self._restored = _NONE
            if self._stage == "ended":
                self._told = -1
                return iter(())
        epoch = int(self._epoch)
        if not goes_on:
            # Now, not with the first item: torchdata takes a state before that.
            self._stage = "begin"
            if epoch >= 0 and (loaded is not _NONE or self._told != epoch):
                tell_epoch(self.dataset, epoch)
        self._told = epoch
        return self._given()

    def _given(self) -> Iterator[Any]:
        for item in self.dataset:
            self._stage, self._restored = "within", _NONE
            yield item
        self._stage, self._restored = "ended", _NONE

    def set_epoch(self, epoch: int) -> None:
        """Tell the dataset, and its copies in workers."""
        self._epoch.fill_(epoch)
        self._told = epoch
        tell_epoch(self.dataset, epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the dataset's state, and how far the pass is."""
        # A copy: a stream may give what it works with, and torchdata compares the state with that of the batch before.
        state = copy.deepcopy(self.dataset.state_dict()) if self._restored is _NONE else self._restored
        return {"state": state, "stage": self._stage}

    def load_state_dict(self, state: Any) -> None:
        """Restore the dataset's state; older checkpoints have that alone."""
        is_kept = isinstance(state, dict) and set(state) == {"state", "stage"}
        self._loaded, self._stage = (state["state"], state["stage"]) if is_kept else (state, "within")
        self._restored = self._loaded
        self.dataset.load_state_dict(copy.deepcopy(self._loaded))  # and may work with what it was given

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name == "dataset" or name.startswith("__"):  # as in DividedStream
            raise AttributeError(name)
        return getattr(self.dataset, name)


def divided_passes(dataset: Any, shard: tuple[int, int], asked: bool | None, where: str, logger: logging.Logger) -> Any:
    """Return the part of a training stream that this process reads, which keeps its passes if the stream has a state."""
    if is_of_hugging_face(dataset):
        own = divided(dataset, shard, asked, True, where, logger)
        return (
            DividedStream(_keeping_passes(dataset), shard, True)
            if isinstance(own, DividedStream)
            else _keeping_passes(own)
        )
    return divided(_keeping_passes(dataset), shard, asked, True, where, logger)


def _keeping_passes(dataset: Any) -> Any:
    has_state = all(callable(getattr(dataset, name, None)) for name in ("state_dict", "load_state_dict"))
    return KeptPasses(dataset) if has_state else dataset


def original(dataset: Any) -> Any:
    """Return the user's stream, without what stands around it here, as a loader of it does."""
    while isinstance(dataset, (DividedStream, KeptPasses)) or getattr(dataset, "is_made_here", False) is True:
        dataset = dataset.dataset
    return dataset
