"""Samplers that are split over processes and resume from any position."""

from __future__ import annotations

import hashlib
import logging
import math
import random
from collections import deque
from collections.abc import Iterable, Iterator, Sequence, Sized
from itertools import chain, count, islice
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import ChainDataset, ConcatDataset, Dataset, Sampler, StackDataset, Subset

from ...core.base.errors import ConfigError, DataError, counted
from ...core.base.overriding import overridden
from ...core.base.registry import DATA_SAMPLERS
from ...core.base.snapshot import Snapshot
from ...core.comm.topology import Topology
from ...core.random.generators import RandomStream, nth_seed
from ...core.random.permutation import Shuffled, Straight

# Call ``set_epoch`` of datasets, samplers and dataloaders at the beginning of an epoch.


HOLDERS = (Subset, ConcatDataset, StackDataset, ChainDataset)
"""Torch's datasets that hold others."""


def takes_epoch(part: Any) -> bool:
    """Whether a dataset, a sampler or a loader is told the epoch."""
    return hasattr(part, "set_epoch")


def tell_epoch(part: Any, epoch: int) -> None:
    """Call ``set_epoch`` of a dataset, a sampler or a loader, if it has one; datasets of torch that hold others have none."""
    if (set_epoch := getattr(part, "set_epoch", None)) is not None:
        set_epoch(epoch)
    elif isinstance(part, HOLDERS):
        for dataset in held_in(part):
            tell_epoch(dataset, epoch)


def held_in(part: Any) -> Iterable[Any]:
    """The datasets that a dataset of torch holds; none of another one."""
    if not isinstance(part, HOLDERS):
        return []
    if isinstance(part, Subset):
        return [part.dataset]
    inner: Any = part.datasets
    if isinstance(inner, dict):
        return inner.values()
    return inner if isinstance(inner, (list, tuple)) else []  # a ChainDataset may have what can be read once


def tell_loader_epoch(loader: Any, epoch: int) -> None:
    """Call ``set_epoch`` of a loader, its dataset and its samplers, where they have one."""
    batches = getattr(loader, "batch_sampler", None)
    # A custom batch sampler holds the sampler itself, and the loader only a placeholder.
    sampler = getattr(batches, "sampler", getattr(loader, "sampler", None))
    for part in (loader, getattr(loader, "dataset", None), *chain_of(sampler), batches):
        tell_epoch(part, epoch)


def warn_of_passes(parts: Iterable[Any], name: str, passes: int) -> None:
    """Warn if none of ``parts`` is told the epoch, in a process that has not read their ``passes`` former passes."""
    if not any(map(takes_epoch, parts)):
        logging.getLogger("flextrain").warning(
            f"train_dataloader: {name} has no set_epoch, so it does not know that {counted(passes, 'pass', 'passes')} came before; "
            "if its passes differ, and it counts them itself, samples are lost or come twice: give it set_epoch(epoch), or a state_dict"
        )


def chain_of(part: Any) -> Iterator[Any]:
    """Yield a sampler, the one inside it, and so on."""
    while part is not None:
        yield part
        part = getattr(part, "sampler", None)


def samplers_in(part: Any) -> list[Any]:
    """The chain of a sampler, and then those inside of them, whatever the names of the attributes, also in lists."""
    found = [*chain_of(part)]
    for one in found:  # which grows
        for value in getattr(one, "__dict__", {}).values():
            items = value if isinstance(value, (list, tuple)) else (value,)
            for item in items if isinstance(next(iter(items), None), Sampler) else ():
                if all(item is not other for other in found):
                    found.append(item)
    return found


LARGE = 2**20
"""Datasets with more samples compute a random order by index: a whole one would fill every process's memory."""
BLOCK = 4096
"""Number of indices computed at once, after some smaller blocks."""
FIRST_BLOCK = 64
_COMPARED = 64  # items of a sampler that all processes must have alike before each keeps its own


def own_order(dataset: Any) -> Any:
    """``order_of_pass`` of a dataset that has its own order; else None."""
    own = getattr(dataset, "order_of_pass", None)
    return own if callable(own) else None


class ShardedSampler(Sampler[int]):
    """Base class of samplers whose position is a number of samples over all processes together.

    A run that stops after ``n`` samples continues at position ``n`` on any number of processes.

    Args:
        dataset: anything with a length. One with ``order_of_pass`` says the order itself, see ``flextrain.data.Order``.
        shuffle: draw a new random order every epoch; False keeps the dataset's order.
        seed: seed of the order; the same on all processes.
        shard: (index, count) of this process's data shard; default: the strategy's, once a runner uses the sampler, and
            before that rank and world size.
    """

    def __init__(
        self, dataset: Sized, shuffle: bool = True, seed: int | None = None, *, shard: tuple[int, int] | None = None
    ) -> None:
        self.dataset = dataset  # batch samplers of projects look at the samples
        self.num_samples = self._length = len(dataset)
        self.shuffle = shuffle
        self.seed = seed or 0
        self.index, self.count = shard or Topology().shard
        self._was_told = shard is not None
        self.epoch = 0
        self.start, self.stop = 0, None
        self._own_order = own_order(dataset)
        self.by_index = shuffle and self.num_samples > LARGE
        """True if a random order is computed by index, not drawn as a whole."""

    stop: int | None

    def use_shard(self, shard: tuple[int, int]) -> None:
        """Use this data shard, unless the constructor was given one."""
        if not self._was_told:
            self.index, self.count = shard

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch whose order comes next."""
        self.epoch = epoch

    def set_span(self, start: int, stop: int | None = None) -> None:
        """Yield only the samples at global positions from ``start`` to ``stop`` of the epoch from now on."""
        self.start, self.stop = start, stop

    def order(self, epoch: int) -> Any:
        """Return the indices of the dataset in the order of ``epoch``: ``order[positions]`` for an array of positions.

        A subclass may return any sequence or array of indices.
        """
        if self._own_order is not None:
            return self._own_order(self.seed, epoch, self.shuffle)
        if not self.shuffle:
            return Straight()
        if self.by_index:
            return Shuffled(self.num_samples, self.seed, epoch)
        generator = torch.Generator().manual_seed(self.seed + epoch)
        return torch.randperm(self.num_samples, generator=generator).numpy()


@DATA_SAMPLERS.register_module()
class DefaultSampler(ShardedSampler):
    """Every sample once per epoch, dealt to the processes in turn.

    Args:
        round_up: repeat samples from the beginning of the order until every process has equally many, fewer than there
            are processes. With False each sample counts exactly once. Some processes may have one less then. In
            training the last update of an epoch is the mean over its samples, as on one process with the same global
            batch; a process that has no sample where others have one repeats one, which counts nothing.

    An epoch that continues with another number of processes splits the remaining samples. No sample is lost.
    """

    def __init__(
        self,
        dataset: Sized,
        shuffle: bool = True,
        seed: int | None = None,
        round_up: bool = True,
        *,
        shard: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(dataset, shuffle, seed, shard=shard)
        self.round_up = round_up
        self.batches: tuple[int, bool] | None = None
        """(batch size, drop_last) in training without ``round_up``: every process has as many batches, see ExactEpochs."""

    def __iter__(self) -> Iterator[int]:
        return _dealt(self, self.epoch, self._positions())

    def _positions(self) -> range:
        """Return this process's positions; if its last batch is missing, a sample fills it that is behind the end."""
        end = self._end(self.start)
        size, drop_last = self.batches or (1, False)
        if drop_last:
            end -= (end - self.start) % (size * self.count)
        stop = end if self.stop is None else min(self.stop, end)
        own = range(self.start + self.index, stop, self.count)
        most = math.ceil((stop - self.start) / self.count)
        if self.batches is None or len(own) >= most or len(own) % size:
            return own
        return range(own.start, own.start + most * self.count, self.count)

    def __len__(self) -> int:
        return self.length_from(0)

    @property
    def total_size(self) -> int:
        """Number of samples of an epoch over all processes together, repeated ones included."""
        return self._end(0)

    def length_from(self, start: int) -> int:
        """Return the number of samples for this process in an epoch that continues at the global position ``start``."""
        return max(0, math.ceil((self._end(start) - start - self.index) / self.count))

    def _end(self, start: int) -> int:
        """Return the global position after the last sample, repeated samples included."""
        left = max(0, self.num_samples - start)
        return start + (math.ceil(left / self.count) * self.count if self.round_up else left)


@DATA_SAMPLERS.register_module()
class InfiniteSampler(ShardedSampler):
    """An endless sequence of epochs, dealt to the processes in turn; for training by iterations."""

    def __iter__(self) -> Iterator[int]:
        position, size = self.start + self.index, self.num_samples
        while self.stop is None or position < self.stop:
            epoch = position // size
            end = (epoch + 1) * size if self.stop is None else min((epoch + 1) * size, self.stop)
            positions = range(position, end, self.count)
            yield from _dealt(self, epoch, positions)
            position += len(positions) * self.count

    def __len__(self) -> int:
        return self.num_samples


def _dealt(sampler: ShardedSampler, epoch: int, positions: range) -> Iterator[int]:
    """Yield the indices at these positions of an epoch's order, which repeats at its end; computed block by block."""
    order, size, name = sampler.order(epoch), sampler.num_samples, type(sampler).__name__
    if (now := len(sampler.dataset)) != sampler._length:
        raise DataError(f"{name}: its dataset has {now} samples, it had {sampler._length}; the length must not change")
    if isinstance(order, Sized) and len(order) != size:
        raise ConfigError(f"{name}.order: gave {len(order)} indices, and a pass has num_samples={size}")
    return chain.from_iterable(_blocks(np.asarray(order) if isinstance(order, Sequence) else order, size, positions))


def _blocks(order: Any, size: int, positions: range) -> Iterator[list[int]]:
    # The first block is small, for a batch at once. The order of a mixture computes other processes' positions too.
    begin, length, longest = 0, FIRST_BLOCK, max(FIRST_BLOCK, BLOCK // positions.step)
    while begin < len(positions):
        block = positions[begin : begin + length]
        begin, length = begin + length, min(2 * length, longest)
        yield order[np.arange(block.start, block.stop, block.step) % size].tolist()


def use_shard(sampler: Any, shard: tuple[int, int], where: str, asked: bool | None = None) -> None:
    """Give samplers of flextrain this data shard, and check that others have it already, unless ``asked`` is False.

    Raises:
        ConfigError: a sampler deals the data to other processes than those of the data shards.
    """
    for part in chain_of(sampler):
        if isinstance(part, ShardedSampler):
            part.use_shard(shard)
        dealt = dealt_by(part)
        if asked is not False and dealt is not None and dealt != shard:
            raise ConfigError(
                f"{where}: {type(part).__name__} deals the data to {dealt[1]} processes and gives this one part {dealt[0]}, but the "
                f'strategy has {shard[1]} data shards, and here is part {shard[0]}; give dict(type="DefaultSampler"), or shard=False '
                "if every process has data of its own"
            )


def dealt_by(sampler: Any) -> tuple[int, int] | None:
    """Return (index, count) of the part that a sampler gives, also one made like torch's; None if it deals nothing."""
    if isinstance(sampler, ShardedSampler):
        return sampler.index, sampler.count
    dealt = getattr(sampler, "rank", None), getattr(sampler, "num_replicas", None)
    return cast("tuple[int, int]", dealt) if all(isinstance(one, int) for one in dealt) else None


def check_is_told(batches: Any, where: str) -> None:
    """Raise ConfigError if a batch sampler has a sampler of flextrain by a name by which it is not found."""
    hidden = {name: part for name, part in getattr(batches, "__dict__", {}).items() if isinstance(part, ShardedSampler)}
    hidden.pop("sampler", None)
    if hidden and not (hasattr(batches, "sampler") and hasattr(batches, "set_epoch")):
        name, part = next(iter(hidden.items()))
        raise ConfigError(
            f"{where}.batch_sampler: {type(batches).__name__} keeps a {type(part).__name__} as {name}, where it is told neither the epoch "
            "nor the seed; keep it as sampler, and tell a further one the epoch in a set_epoch(epoch) of the batch sampler"
        )


class DividedSampler(Sampler[Any]):
    """Every ``count``-th item of a sampler, or of a batch sampler, that gives all processes the same items.

    Args:
        sampler: the sampler.
        shard: (index, count) of the items to give.
        fill: give every process equally many: those that have none of the last items repeat the first ones.
    """

    def __init__(self, sampler: Any, shard: tuple[int, int], fill: bool) -> None:
        self.sampler, self._shard, self._fill = sampler, shard, fill
        self.batch_size, self.drop_last = getattr(sampler, "batch_size", None), getattr(sampler, "drop_last", False)

    def __iter__(self) -> Iterator[Any]:
        index, size = self._shard
        items = iter(self.sampler)
        first, number = list(islice(items, size)), 0
        for number, item in enumerate(chain(first, items), 1):
            if (number - 1) % size == index:
                yield item
        if self._fill and 0 < number % size <= index:
            yield first[(index - number % size) % len(first)]

    def __len__(self) -> int:
        index, count = self._shard
        return int(len(self.sampler) + count - 1 - (0 if self._fill else index)) // count

    def begin(self, seed: int) -> str:
        """Return a digest of the first items of all processes together, without any effect on the sampler; empty where it has one."""
        parts = (getattr(part, "__dict__", {}) for part in samplers_in(self.sampler))
        if any(isinstance(kept, Iterator) for part in parts for kept in part.values()):
            return ""  # nobody can set an iterator back
        before = Snapshot([self.sampler])
        order = Repeatable(self.sampler)
        order.position(seed, 0, _COMPARED)
        begin = repr(list(order)).encode()
        before.restore()
        return hashlib.sha256(begin).hexdigest()


def divided_sampler(loader: Any) -> DividedSampler | None:
    """Return the DividedSampler of a loader; None if it has none."""
    batches = getattr(loader, "batch_sampler", None)
    for part in (batches, getattr(batches, "sampler", None), getattr(loader, "sampler", None)):
        if isinstance(part, DividedSampler):
            return part
    return None


def follows_span(sampler: object) -> bool:
    """True if a sampler begins where ``set_span`` says, so that its position in an epoch is a number of samples.

    A subclass that overrides ``__iter__`` or ``__len__`` may ignore the span, so its order is repeated from the start.
    """
    return isinstance(sampler, ShardedSampler) and not overridden(sampler, "__iter__", "__len__")


def seed_own_generators(sampler: Any, seed: int) -> None:
    """Seed the generators that a sampler keeps, and those of the samplers inside it; of one with a state only its ``generator``."""
    in_chain = len([*chain_of(sampler)])
    for number, part in enumerate(samplers_in(sampler)):
        own = seed if number < in_chain else nth_seed(seed, number) >> 1  # those beside each other draw apart
        others = () if hasattr(part, "load_state_dict") else getattr(part, "__dict__", {}).values()
        for generator in (getattr(part, "generator", None), *others):
            if isinstance(generator, torch.Generator):
                generator.manual_seed(own)
            elif isinstance(generator, np.random.Generator):
                bits: Any = generator.bit_generator
                bits.state = type(bits)(own).state
            elif isinstance(generator, (random.Random, np.random.RandomState)):
                generator.seed(own % 2**32)


_DEPTH = 4  # attributes, objects, lists, and lists in them, as buckets of indices


def held(value: Any, depth: int = _DEPTH) -> Any:
    """What a pass may change in a sampler's attribute: values, and what lists, dicts, arrays and objects hold, in their order."""
    if isinstance(value, dict):
        return [(key, held(item, depth - 1)) for key, item in value.items()] if depth else None
    if isinstance(value, (list, tuple, deque, set)):
        return [held(item, depth - 1) for item in value] if depth else None
    if isinstance(value, Iterator):
        return repr(value) if isinstance(value, count) else object()  # nobody sees how far another one is
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if depth and hasattr(value, "__dict__") and not isinstance(value, (type, Dataset, Sampler)) and not callable(value):
        return held(vars(value), depth - 1)
    return value if isinstance(value, (bool, int, float, str)) else None


class Repeatable(Sampler[Any]):
    """The items of another sampler from number ``start`` to ``stop`` of an epoch, the same at every call.

    The other sampler draws from a stream that starts again in every epoch, whether it uses the process's generators or keeps
    one of its own, of torch, NumPy or ``random``. So its order does not depend on what the model draws, and to resume is to repeat the
    first part. A sampler with another kind of RNG state must derive it from ``set_epoch``.
    """

    def __init__(self, sampler: Iterable[Any]) -> None:
        self.sampler = sampler
        self._seed, self._start, self._stop = 0, 0, None

    _stop: int | None

    def position(self, seed: int, start: int, stop: int | None) -> None:
        """Set the next span of items; ``seed`` is that of the epoch."""
        self._seed, self._start, self._stop = seed, start, stop

    def __iter__(self) -> Iterator[Any]:
        return (item for _, item in self.positions())

    def positions(self) -> Iterator[tuple[int, Any]]:
        """Yield the items of the span, each with the number of samples before it."""
        stream, at = RandomStream(self._seed), 0
        seed_own_generators(self.sampler, self._seed)
        with stream:
            items = iter(self.sampler)
        for number in count() if self._stop is None else range(self._stop):
            with stream:
                item = next(items, _END)
            if item is _END:
                return
            if number >= self._start:
                yield at, item
            at += len(item) if isinstance(item, Sized) else 1

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]


_END = object()
