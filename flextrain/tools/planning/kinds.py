"""Books of memory: how many bytes are alive, of which kind, and when they were the most."""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .plan import Kind

_UNSETTLED: tuple[Kind, ...] = ("activations", "temporary")
"""Kinds of memory of which nobody has said what it is."""


def parts_of(value: Any) -> Iterator[Tensor]:
    """Yield the tensors with memory that a tensor consists of; those inside of it, if it is a wrapper such as a DTensor."""
    if not isinstance(value, Tensor) or value.is_meta:
        return
    flatten = getattr(value, "__tensor_flatten__", None)
    if flatten is None:
        yield value
        return
    for name in flatten()[0]:
        yield from parts_of(getattr(value, name))


@dataclass(eq=False)
class _Entry:
    """The memory of one storage."""

    size: int
    kind: Kind


class Memory:
    """The memory of all tensors that were noted, until they are gone.

    Args:
        on_growth: called whenever more memory is alive than ever before.
    """

    def __init__(self, on_growth: Callable[[], object]) -> None:
        self._on_growth = on_growth
        self._known: weakref.WeakKeyDictionary[torch.UntypedStorage, _Entry] = weakref.WeakKeyDictionary()
        self.by_kind: collections.Counter[Kind] = collections.Counter()
        self.total = 0
        self._highest = 0

    def forget_highest(self) -> None:
        """Look for the highest anew."""
        self._highest = 0

    def note(self, tensor: Tensor, kind: Kind) -> _Entry:
        """Count a tensor's memory as ``kind``, if it is not known yet."""
        storage = tensor.untyped_storage()
        entry = self._known.get(storage)
        if entry is None:
            entry = self._known[storage] = _Entry(0, kind)
            weakref.finalize(storage, self._set, entry, 0, None).atexit = False
        if entry.size != storage.nbytes():
            self._set(entry, storage.nbytes())
        return entry

    def mark(self, kind: Kind, values: Iterable[Any], *, settles: bool = True) -> None:
        """Say what tensors are, or have become; not of those that are something already, unless ``settles``."""
        for value in values:
            for tensor in parts_of(value):
                entry = self.note(tensor, kind)
                if entry.kind != kind and (settles or entry.kind in _UNSETTLED):
                    self._set(entry, entry.size, kind)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count a storage's new size."""
        if (entry := self._known.get(storage)) is not None:
            self._set(entry, storage.nbytes())

    def in_use(self) -> dict[Kind, int]:
        """Return the bytes that are alive, by kind."""
        return {kind: size for kind, size in self.by_kind.items() if size}

    def _set(self, entry: _Entry, size: int, kind: Kind | None = None) -> None:
        self.by_kind[entry.kind] -= entry.size
        self.total += size - entry.size
        entry.size, entry.kind = size, kind or entry.kind
        self.by_kind[entry.kind] += size
        if self.total > self._highest:
            self._highest = self.total
            self._on_growth()
