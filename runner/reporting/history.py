"""HistoryBuffer: the last values of one scalar, some of which may still be on a device."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from ...core.distributed import all_reduce, get_world_size
from ...core.errors import ConfigError, one_of, suggest


class HistoryBuffer:
    """The last ``maxlen`` values of one scalar (None: all), each with the number of items it sums up.

    Every statistic first brings pending tensors to the host, which waits for the device.
    """

    __slots__ = ("_appended", "_counts", "_fetched", "_reduced", "_values")

    def __init__(self, maxlen: int | None = None) -> None:
        self._values: deque[float | Tensor] = deque(maxlen=maxlen)
        self._counts: deque[int] = deque(maxlen=maxlen)
        # All three count values since the start, dropped ones too: how many came, and up to which one they are on the
        # host, and means over the ranks.
        self._appended = self._fetched = self._reduced = 0

    def append(self, value: float | Tensor, count: int = 1) -> None:
        """Add one value; a tensor is kept as it is."""
        self._values.append(value)
        self._counts.append(count)
        self._appended += 1

    def __len__(self) -> int:
        return len(self._values)

    def grow(self, maxlen: int | None) -> None:
        """Keep at least ``maxlen`` values from now on; None: all."""
        now = self._values.maxlen
        if now is not None and (maxlen is None or maxlen > now):
            self._values = deque(self._values, maxlen)
            self._counts = deque(self._counts, maxlen)

    # Statistics

    @property
    def data(self) -> list[float]:
        """The values that are kept, oldest first."""
        fetch([self])
        return cast("list[float]", list(self._values))

    def current(self) -> float:
        """The newest value."""
        return self._last(1)[0]

    def mean(self, window_size: int | None = None) -> float:
        """The mean of the last ``window_size`` values, of all that are kept by default."""
        values = self._last(window_size)
        counts = _tail(self._counts, len(values))
        return sum(values) / float(sum(counts))

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

    def _last(self, window_size: int | None) -> list[float]:
        if self._fetched != self._appended:
            fetch([self])
        length = len(self._values)
        values = _tail(self._values, length if window_size is None else min(window_size, length))
        return cast("list[float]", values)

    # Between devices and ranks

    def reduce(self) -> None:
        """Replace the values since the last call by their means over the ranks; all ranks must call it."""
        new = min(self._appended - self._reduced, len(self._values))
        self._reduced = self._appended
        if get_world_size() == 1 or new == 0:
            return
        values = _tail(self._values, new)
        device = next((value.device for value in values if isinstance(value, Tensor)), torch.device("cpu"))
        means = all_reduce(torch.stack([_as_float(value, device) for value in values]), "mean")
        for _ in range(new):
            self._values.pop()
        self._values.extend(means.unbind())
        self._fetched = min(self._fetched, self._appended - new)

    def _pending(self) -> list[tuple[int, Tensor]]:
        new = min(self._appended - self._fetched, len(self._values))
        self._fetched = self._appended
        return [(i, value) for i in range(-new, 0) if isinstance(value := self._values[i], Tensor)]

    # State

    def state_dict(self) -> dict[str, Any]:
        """The values that are kept, for JSON."""
        return {"values": self.data, "counts": list(self._counts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what ``state_dict`` gave; other values are dropped."""
        self._values.clear()
        self._counts.clear()
        for value, count in zip(state["values"], state["counts"], strict=True):
            self.append(value, count)
        self._fetched = self._reduced = self._appended


STATISTICS = ("mean", "min", "max", "current")


def check_statistic(name: str, where: str) -> None:
    """Raise ConfigError unless ``name`` is a statistic."""
    if name not in STATISTICS:
        raise ConfigError(f'{where}: "{name}" is not allowed, choose {one_of(STATISTICS)}{suggest(name, STATISTICS)}')


def fetch(buffers: Iterable[HistoryBuffer]) -> None:
    """Bring the pending tensors of all ``buffers`` to the host, in one copy per device and dtype.

    Half-precision values travel as float32, so that a loss and a gradient norm share one copy.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[tuple[HistoryBuffer, int, Tensor]]] = {}
    for buffer in buffers:
        if buffer._fetched == buffer._appended:
            continue
        for i, value in buffer._pending():
            wide = torch.float32 if value.dtype in (torch.float16, torch.bfloat16) else value.dtype
            groups.setdefault((value.device, wide), []).append((buffer, i, value))
    for (_, dtype), entries in groups.items():
        stacked = torch.stack([_as_scalar(value, dtype) for _, _, value in entries])
        for (buffer, i, _), number in zip(entries, stacked.tolist(), strict=True):
            buffer._values[i] = float(number)


def _tail(values: deque[Any], length: int) -> list[Any]:
    if length == len(values):
        return list(values)
    return [values[i] for i in range(-length, 0)]


def _as_scalar(value: Tensor, dtype: torch.dtype) -> Tensor:
    if value.dim():
        value = value.reshape(())
    return value if value.dtype is dtype else value.to(dtype)


def _as_float(value: float | Tensor, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        return _as_scalar(value, torch.float32).to(device)
    return torch.tensor(value, dtype=torch.float32, device=device)
