"""HistoryBuffer: the last values of one scalar; the newest may still be tensors on a device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, ClassVar, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...core.base.errors import ConfigError, one_of, suggest
from ...core.comm.collectives import all_reduce
from ...core.comm.topology import Topology


class HistoryBuffer:
    """The last values of one scalar, each with the number of items that it sums up.

    ``append`` only stores the value, because it runs in every iteration. Every statistic first reads the new values,
    which waits for the device.

    Args:
        log_history: values to begin with.
        count_history: the number of items that each of them sums up; default: 1.
        max_length: number of values kept; None: all.
        name: the scalar's name, for messages.
    """

    __slots__ = ("_counts", "_device", "_local", "_new", "_read", "_values", "averaged", "name", "put")

    _statistics_methods: ClassVar[dict[str, Callable[..., Any]]] = {}

    def __init__(
        self,
        log_history: Sequence[float] = (),
        count_history: Sequence[int] = (),
        max_length: int | None = None,
        *,
        name: str = "scalar",
    ) -> None:
        maxlen = max_length
        self.name = name
        self._new: deque[Any] = deque(maxlen=maxlen)  # numbers, tensors, and (number or tensor, count)
        self._values: deque[float] = deque(maxlen=maxlen)
        self._counts: deque[int] | None = None  # item counts of the values; None while all are 1
        self._device = torch.device("cpu")  # device of the last tensor
        self._local = 0  # number of newest values that are this process's own, not yet means over the processes
        self._read = 0  # number of values read so far
        self.averaged: list[Any] = []
        """This rank's own values, in order, that the last ``reduce`` replaced by means."""
        self.put: Callable[[float | Tensor], None] = self._new.append
        """``append`` of a value that counts once, without a call in between."""
        has_counts = len(count_history) > 0  # an array has no truth value
        if has_counts and len(count_history) != len(log_history):
            raise ConfigError(f"{name}: {len(log_history)} values have {len(count_history)} counts")
        for i, value in enumerate(log_history):
            self.append(value, count_history[i] if has_counts else 1)

    def append(self, value: float | Tensor, count: int = 1) -> None:
        """Add one value; a tensor must have one element and no autograd graph, and must not be changed later."""
        self._new.append(value if count == 1 else (value, count))

    def update(self, log_val: float | Tensor, count: int = 1) -> None:
        """MMEngine's name of ``append``."""
        self.append(log_val, count)

    def __len__(self) -> int:
        length = len(self._values) + len(self._new)
        maxlen = self._values.maxlen
        return length if maxlen is None else min(length, maxlen)

    @property
    def max_length(self) -> int | None:
        """Number of values kept; None: all."""
        return self._values.maxlen

    def grow(self, maxlen: int | None) -> None:
        """Keep at least ``maxlen`` values from now on; None: keep all."""
        now = self._values.maxlen
        if now is not None and (maxlen is None or maxlen > now):
            self._new, self._values = deque(self._new, maxlen), deque(self._values, maxlen)
            self.put = self._new.append
            self._counts = None if self._counts is None else deque(self._counts, maxlen)

    @property
    def updates(self) -> int:
        """The number of values appended so far; loaded values do not count."""
        return self._read + len(self._new)

    def newest(self, count: int) -> list[Any]:
        """Return the last ``count`` values, newest first, as far as they are kept; unread values may be tensors."""
        return [entry[0] if type(entry) is tuple else entry for entry in self._tail(count)]

    def unread_mean(self, count: int) -> UnreadMean | None:
        """Return the mean of the last ``count`` values, to be read later.

        None if it must be read now: because half of the buffer is unread, so values would soon be dropped; or because
        values are sums over several items.
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
    def values(self) -> list[float]:
        """The kept values, oldest first."""
        fetch([self])
        return list(self._values)

    @property
    def data(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """The kept values and the number of items that each sums up, oldest first: copies of shape (kept,)."""
        values = self.values
        counts = [1] * len(values) if self._counts is None else list(self._counts)
        return np.array(values, np.float64), np.array(counts, np.int64)

    @property
    def _log_history(self) -> npt.NDArray[np.float64]:
        """The values, under the name that statistics written for MMEngine use."""
        return self.data[0]

    @property
    def _count_history(self) -> npt.NDArray[np.int64]:
        """The counts, under the name that statistics written for MMEngine use."""
        return self.data[1]

    def current(self) -> float:
        """Return the newest value."""
        if self._new:
            fetch([self])
        if not self._values:
            raise ConfigError(f"{self.name}: has no value yet")
        return self._values[-1]

    def mean(self, window_size: int | None = None) -> float:
        """Return the mean of the last ``window_size`` values; default: of all kept values."""
        total = sum(self._last(window_size))
        if self._counts is not None:
            return total / sum(islice(reversed(self._counts), window_size))
        length = len(self._values)
        return total / (length if window_size is None or window_size > length else window_size)

    def max(self, window_size: int | None = None) -> float:
        """Return the largest of the last values."""
        return max(self._last(window_size))

    def min(self, window_size: int | None = None) -> float:
        """Return the smallest of the last values."""
        return min(self._last(window_size))

    @classmethod
    def register_statistics(cls, method: Callable[..., Any]) -> Callable[..., Any]:
        """Decorator: make a function available as a statistic, by its name, in ``log_processor.custom_cfg`` too.

        Args:
            method: is called with the buffer and, by their names, the arguments of ``statistics``; ``buffer.data`` gives
                it values and counts.

        Raises:
            ConfigError: there is a statistic of this name.
        """
        name = method.__name__
        if name in statistic_names():
            raise ConfigError(f'register_statistics: "{name}" is a statistic already, give the function another name')
        cls._statistics_methods[name] = method
        return method

    def statistics(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Return the statistic with this name: mean, min, max, current, or a registered one."""
        check_statistic(method_name, "log_processor.custom_cfg.method_name")
        if method_name in self._statistics_methods:
            return self._statistics_methods[method_name](self, *args, **kwargs)
        if method_name == "current":
            return self.current()
        return getattr(self, method_name)(*args, **kwargs)

    def _last(self, window_size: int | None) -> Iterable[float]:
        if self._new:
            fetch([self])
        return islice(reversed(self._values), window_size)

    # Between devices and ranks

    def reduce(self, topology: Topology, beside: Sequence[Any] = ()) -> Tensor | None:
        """Replace the values since the last call by their means over the data shards, unread; a collective.

        Returns:
            A number that is finite if all of ``beside`` is finite on all processes, which may pass different numbers of
            values; None if nothing was averaged.
        """
        counts = self._counts
        own: list[tuple[Any, int]] = []
        for _ in range(self._local):
            own.insert(0, (self._values.pop(), 1 if counts is None else counts.pop()))
            self._read -= 1
        own += [entry if type(entry) is tuple else (entry, 1) for entry in self._new]
        if self._values.maxlen is not None:
            own = own[-self._values.maxlen :]  # every process sends the same number, read or not
        self.averaged, total = [value for value, _ in own], None
        if own:
            # The device of the tensors, also on a rank that has read them: each kind of device has its own back end.
            device = next((value.device for value, _ in own if isinstance(value, Tensor)), self._device)
            sent = [_as_float(value, device) for value, _ in own]
            sent.append(
                torch.stack([_as_float(value, device) for value in beside]).sum() if beside else sent[0].new_zeros(())
            )
            *means, total = topology.data.mean(torch.stack(sent)).unbind()
            if topology.shares_data:  # every replica of a shard must get the same verdict
                total = all_reduce(torch.stack([*means, total]).sum())
            self._new.clear()
            for mean, (_, count) in zip(means, own, strict=True):
                self.append(mean, count)
        self._local = -len(self._new)  # when they are read, ``_local`` becomes 0
        return total

    def _take(self) -> list[Any]:
        """Remove and return the new values, for the caller to read and pass to ``_settle``; keep their counts."""
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
        """Return the kept values and their counts, for JSON."""
        values = self.values
        return {"values": values, "counts": [1] * len(values) if self._counts is None else list(self._counts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of ``state_dict``; the current values are dropped."""
        self._new.clear()
        self._values.clear()
        self._values.extend(state["values"])
        only_ones = all(count == 1 for count in state["counts"])
        self._counts = None if only_ones else deque(state["counts"], self._values.maxlen)
        self._local = 0

    def own(self, topology: Topology) -> list[float]:
        """Return the newest values that are this process's own, not yet means; none if there is only one data shard."""
        values = self.values
        return values[len(values) - self._local :] if topology.data.count > 1 else []

    def load_own(self, by_shard: Sequence[Sequence[float]], topology: Topology) -> None:
        """Replace the newest values by the results of ``own``, one list per data shard.

        If the number of shards has changed, every shard takes the means, which keeps the mean over the shards.
        """
        self._local = len(by_shard[0])
        for _ in range(self._local):
            self._values.pop()
        same = len(by_shard) == topology.data.count
        means = (sum(values) / len(by_shard) for values in zip(*by_shard, strict=True))
        self._values.extend(by_shard[topology.data.index] if same else means)


class UnreadMean:
    """The mean of some values of a history, to be read later; it stays valid when the history changes.

    Args:
        values: numbers and one-element tensors, newest first.
    """

    __slots__ = ("_values", "tensors")

    def __init__(self, values: list[Any]) -> None:
        self._values = values
        self.tensors = _tensors(values)
        """The values that are still tensors on a device."""

    def settle(self, read: Mapping[int, float]) -> None:
        """Replace every tensor by its number, which ``read`` has by identity."""
        self._values, self.tensors = _as_numbers(self._values, read), []

    def mean(self) -> float:
        """Return the mean, after reading the values that are unread."""
        if self.tensors:
            fetch([], [self])
        return cast(float, sum(self._values) / len(self._values))


def statistic_names() -> list[str]:
    """Return the names of all statistics, own and registered."""
    return ["mean", "min", "max", "current", *HistoryBuffer._statistics_methods]


def check_statistic(name: str, where: str) -> None:
    """Raise ConfigError unless ``name`` is a known statistic."""
    names = statistic_names()
    if name not in names:
        raise ConfigError(f'{where}: "{name}" is not allowed, choose {one_of(names)}{suggest(name, names)}')


def fetch(buffers: Iterable[HistoryBuffer], means: Sequence[UnreadMean] = ()) -> None:
    """Read the new values of ``buffers``, and the ``means``: one copy to the host per device and dtype."""
    waiting: list[tuple[HistoryBuffer, list[Any]]] = []
    tensors: dict[int, Tensor] = {}  # by identity, because a mean shares tensors with the buffers
    for buffer in buffers:
        if buffer._new:
            new = buffer._take()
            if set(map(type, new)) == {float}:
                buffer._settle(new)
            else:
                found = _tensors(new)
                for value in found:
                    if value.numel() != 1:
                        shape = tuple(value.shape)
                        raise ConfigError(f"{buffer.name}: a tensor of shape {shape} is no scalar, give one element")
                if found:
                    buffer._device = found[-1].device
                tensors |= zip(map(id, found), found, strict=True)
                waiting.append((buffer, new))
    unread = [mean for mean in means if mean.tensors]
    for mean in unread:
        tensors |= zip(map(id, mean.tensors), mean.tensors, strict=True)
    read = dict(zip(tensors, _numbers(list(tensors.values())), strict=True))
    for buffer, new in waiting:
        buffer._settle(_as_numbers(new, read))
    for mean in unread:
        mean.settle(read)


def _tensors(values: list[Any]) -> list[Tensor]:
    """Return the tensors among the values; most scalars are numbers, and cost no look at each."""
    return [] if set(map(type, values)) == {float} else [value for value in values if isinstance(value, Tensor)]


def _as_numbers(values: list[Any], read: Mapping[int, float]) -> list[float]:
    return [read[id(value)] if isinstance(value, Tensor) else float(value) for value in values]


def _numbers(tensors: list[Tensor]) -> list[float]:
    """Return the values of one-element tensors; half-precision is copied as float32, to share a copy with the rest."""
    if not tensors:
        return []
    kinds = {(tensor.device, tensor.dtype, tensor.ndim) for tensor in tensors}
    if len(kinds) == 1 and tensors[0].ndim == 0 and tensors[0].dtype.is_floating_point:  # the usual case
        return cast("list[float]", torch.stack(tensors).tolist())
    numbers: list[float] = [0.0] * len(tensors)
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, tensor in enumerate(tensors):
        groups.setdefault((tensor.device, _wide(tensor.dtype)), []).append(i)
    for (_, dtype), indices in groups.items():
        read = torch.stack([tensors[i].reshape(()).to(dtype) for i in indices]).tolist()
        for i, number in zip(indices, read, strict=True):
            numbers[i] = float(number)
    return numbers


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _as_float(value: float | Tensor, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        return value.reshape(()).to(device, torch.float32)
    return torch.tensor(value, dtype=torch.float32, device=device)
