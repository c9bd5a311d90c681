"""HistoryBuffer: the last values of one scalar, the newest of which may still be on a device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor

from ...core.comm.collectives import all_reduce
from ...core.comm.topology import Topology
from ...core.errors import ConfigError, one_of, suggest


class HistoryBuffer:
    """The last ``maxlen`` values of one scalar (None: all), each with the number of items it sums up.

    ``append`` does next to nothing, because it runs in every iteration: what is new waits, unread. Every statistic first
    reads what is new, which waits for the device.

    Args:
        maxlen: values kept.
        name: for messages.
    """

    __slots__ = ("_counts", "_device", "_local", "_new", "_read", "_values", "averaged", "name")

    def __init__(self, maxlen: int | None = None, name: str = "scalar") -> None:
        self.name = name
        self._new: deque[Any] = deque(maxlen=maxlen)  # numbers, tensors, and (number or tensor, count)
        self._values: deque[float] = deque(maxlen=maxlen)
        self._counts: deque[int] | None = None  # of the values; None while all of them are 1
        self._device = torch.device("cpu")  # of the last tensor
        self._local = 0  # how many of the values at the end are this rank's own, no means over the ranks yet
        self._read = 0  # how many were read in all
        self.averaged: list[Any] = []
        """This rank's own values, as they came, of which the last ``reduce`` has made means."""

    def append(self, value: float | Tensor, count: int = 1) -> None:
        """Add one value; a tensor has one element, no graph behind it, and is not changed by anybody afterwards."""
        self._new.append(value if count == 1 else (value, count))

    def __len__(self) -> int:
        length = len(self._values) + len(self._new)
        maxlen = self._values.maxlen
        return length if maxlen is None else min(length, maxlen)

    def grow(self, maxlen: int | None) -> None:
        """Keep at least ``maxlen`` values from now on; None: all."""
        now = self._values.maxlen
        if now is not None and (maxlen is None or maxlen > now):
            self._new, self._values = deque(self._new, maxlen), deque(self._values, maxlen)
            self._counts = None if self._counts is None else deque(self._counts, maxlen)

    @property
    def updates(self) -> int:
        """A number that grows with whatever is appended, and not with what is loaded."""
        return self._read + len(self._new)

    def newest(self, count: int) -> list[Any]:
        """The last ``count`` values, newest first, as far as they are kept; what nobody has read is still a tensor."""
        return [entry[0] if type(entry) is tuple else entry for entry in self._tail(count)]

    def unread_mean(self, count: int) -> UnreadMean | None:
        """The mean of the last ``count`` values, to be read later.

        None where it should be read now: half as many values as are kept are unread, and some will be dropped before long;
        or values are sums over several items.
        """
        maxlen = self._new.maxlen
        if self._counts is not None or (maxlen is not None and 2 * len(self._new) >= maxlen):
            return None
        entries = self._tail(count)
        return None if tuple in map(type, entries) else UnreadMean(entries)

    def _tail(self, count: int) -> list[Any]:
        new = self._new
        if count <= len(new):
            return list(islice(reversed(new), count))
        return [*reversed(new), *islice(reversed(self._values), count - len(new))]

    # Statistics

    @property
    def data(self) -> list[float]:
        """The values that are kept, oldest first."""
        fetch([self])
        return list(self._values)

    def current(self) -> float:
        """The newest value."""
        if self._new:
            fetch([self])
        return self._values[-1]

    def mean(self, window_size: int | None = None) -> float:
        """The mean of the last ``window_size`` values, of all that are kept by default."""
        total = sum(self._last(window_size))
        if self._counts is not None:
            return total / sum(islice(reversed(self._counts), window_size))
        length = len(self._values)
        return total / (length if window_size is None or window_size > length else window_size)

    def max(self, window_size: int | None = None) -> float:
        """The largest of the last values."""
        return max(self._last(window_size))

    def min(self, window_size: int | None = None) -> float:
        """The smallest of the last values."""
        return min(self._last(window_size))

    def statistics(self, method_name: str, window_size: int | None = None) -> float:
        """The statistic of this name: mean, min, max or current."""
        check_statistic(method_name, "log_processor.custom_cfg.method_name")
        if method_name == "current":
            return self.current()
        return cast(float, getattr(self, method_name)(window_size))

    def _last(self, window_size: int | None) -> Iterable[float]:
        if self._new:
            fetch([self])
        return islice(reversed(self._values), window_size)

    # Between devices and ranks

    def reduce(self, topology: Topology, beside: Sequence[Any] = ()) -> Tensor | None:
        """Replace the values since the last call by their means over the parts of the data, unread; all ranks must call it.

        Returns:
            A number that is finite if all numbers and tensors ``beside`` are, on all ranks, which may give different counts
            of them; None where nothing was averaged.
        """
        if topology.is_alone:
            return None
        counts = self._counts
        own: list[tuple[Any, int]] = []
        for _ in range(self._local):
            own.insert(0, (self._values.pop(), 1 if counts is None else counts.pop()))
            self._read -= 1
        own += [entry if type(entry) is tuple else (entry, 1) for entry in self._new]
        if self._values.maxlen is not None:
            own = own[-self._values.maxlen :]  # whatever part of them this rank has read meanwhile, all send as many
        self.averaged, total = [value for value, _ in own], None
        if own:
            # Where the tensors are, also on a rank that has read them: each kind of device has a back end of its own.
            device = next((value.device for value, _ in own if isinstance(value, Tensor)), self._device)
            sent = [_as_float(value, device) for value, _ in own]
            sent.append(
                torch.stack([_as_float(value, device) for value in beside]).sum() if beside else sent[0].new_zeros(())
            )
            *means, total = topology.data.mean(torch.stack(sent)).unbind()
            if topology.shares_data:  # whoever acts on it has to know the same, also about what should be equal
                total = all_reduce(torch.stack([*means, total]).sum())
            self._new.clear()
            for mean, (_, count) in zip(means, own, strict=True):
                self.append(mean, count)
        self._local = -len(self._new)  # they will be read, and then none is this rank's own
        return total

    def _take(self) -> list[Any]:
        """What is new, to be read and given to ``_settle``; its counts are settled here."""
        new = list(self._new)
        self._new.clear()
        if self._counts is not None or tuple in map(type, new):
            pairs = [entry if type(entry) is tuple else (entry, 1) for entry in new]
            if self._counts is None:
                self._counts = deque([1] * len(self._values), self._values.maxlen)
            self._counts.extend(count for _, count in pairs)
            return [value for value, _ in pairs]
        return new

    def _settle(self, numbers: list[float]) -> None:
        self._values.extend(numbers)
        self._read += len(numbers)
        self._local = min(self._local + len(numbers), len(self._values))

    # State

    def state_dict(self) -> dict[str, Any]:
        """The values that are kept, for JSON."""
        values = self.data
        return {"values": values, "counts": [1] * len(values) if self._counts is None else list(self._counts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what ``state_dict`` gave; other values are dropped."""
        self._new.clear()
        self._values.clear()
        self._values.extend(state["values"])
        only_ones = all(count == 1 for count in state["counts"])
        self._counts = None if only_ones else deque(state["counts"], self._values.maxlen)
        self._local = 0

    def own(self, topology: Topology) -> list[float]:
        """The newest values, as many as are this rank's own and no means yet; none where there is nobody to average with."""
        values = self.data
        return values[len(values) - self._local :] if topology.data.count > 1 else []

    def load_own(self, by_shard: Sequence[Sequence[float]], topology: Topology) -> None:
        """Put what ``own`` gave, by part of the data, in the place of as many of the newest values.

        Among another number of parts than those every one takes the means, whose mean over the parts is the same.
        """
        self._local = len(by_shard[0])
        for _ in range(self._local):
            self._values.pop()
        same = len(by_shard) == topology.data.count
        means = (sum(values) / len(by_shard) for values in zip(*by_shard, strict=True))
        self._values.extend(by_shard[topology.data.index] if same else means)


class UnreadMean:
    """The mean of values that are kept until somebody reads them, whatever becomes of the history that they are from.

    Args:
        values: numbers and tensors with one element, newest first.
    """

    __slots__ = ("_values",)

    def __init__(self, values: list[Any]) -> None:
        self._values = values

    @property
    def tensors(self) -> list[Tensor]:
        """Those that are still on a device."""
        return [value for value in self._values if isinstance(value, Tensor)]

    def settle(self, number: Callable[[Any], float]) -> None:
        """Take the ``number`` of every value in its place."""
        self._values = list(map(number, self._values))

    def mean(self) -> float:
        """The mean; what is unread is read."""
        fetch([], [self])
        return cast(float, sum(self._values) / len(self._values))


STATISTICS = ("mean", "min", "max", "current")


def check_statistic(name: str, where: str) -> None:
    """Raise ConfigError unless ``name`` is a statistic."""
    if name not in STATISTICS:
        raise ConfigError(f'{where}: "{name}" is not allowed, choose {one_of(STATISTICS)}{suggest(name, STATISTICS)}')


def fetch(buffers: Iterable[HistoryBuffer], means: Sequence[UnreadMean] = ()) -> None:
    """Read what is new in all ``buffers``, and the ``means``: tensors come to the host in one copy per device and dtype."""
    waiting: list[tuple[HistoryBuffer, list[Any]]] = []
    tensors: dict[int, Tensor] = {}  # by identity: a mean has tensors that the buffers have too
    for buffer in buffers:
        if buffer._new:
            new = buffer._take()
            if set(map(type, new)) == {float}:
                buffer._settle(new)
            else:
                found = [value for value in new if isinstance(value, Tensor)]
                for value in found:
                    if value.numel() != 1:
                        shape = tuple(value.shape)
                        raise ConfigError(f"{buffer.name}: a tensor of shape {shape} is no scalar, give one element")
                if found:
                    buffer._device = found[-1].device
                tensors |= zip(map(id, found), found, strict=True)
                waiting.append((buffer, new))
    for mean in means:
        tensors |= ((id(value), value) for value in mean.tensors)
    read = dict(zip(tensors, _numbers(list(tensors.values())), strict=True))

    def number(value: Any) -> float:
        return read[id(value)] if isinstance(value, Tensor) else float(value)

    for buffer, new in waiting:
        buffer._settle(list(map(number, new)))
    for mean in means:
        mean.settle(number)


def _numbers(tensors: list[Tensor]) -> list[float]:
    """The values of one-element tensors; half-precision travels as float32, so that loss and gradient norm share a copy."""
    if not tensors:
        return []
    kinds = {(tensor.device, tensor.dtype, tensor.ndim) for tensor in tensors}
    if len(kinds) == 1 and tensors[0].ndim == 0 and tensors[0].dtype.is_floating_point:  # almost always
        return cast("list[float]", torch.stack(tensors).tolist())
    numbers: list[float] = [0.0] * len(tensors)
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, tensor in enumerate(tensors):
        groups.setdefault((tensor.device, _wide(tensor.dtype)), []).append(i)
    for (_, dtype), places in groups.items():
        read = torch.stack([tensors[i].reshape(()).to(dtype) for i in places]).tolist()
        for i, number in zip(places, read, strict=True):
            numbers[i] = float(number)
    return numbers


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _as_float(value: float | Tensor, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        return value.reshape(()).to(device, torch.float32)
    return torch.tensor(value, dtype=torch.float32, device=device)
