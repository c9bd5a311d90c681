"""Read parts of tensors from an open file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ...errors import CheckpointError
from ...heartbeat import heartbeat

Slices = tuple[slice, ...]


class Fetch:
    """Reads parts of tensors from one file: ``fetch(name, slices)``.

    Args:
        path: the file, for messages.
        read: function that reads a part of a tensor.
    """

    def __init__(self, path: Path, read: Callable[[str, Slices], Tensor]) -> None:
        self.path, self._read = path, read

    def __call__(self, name: str, slices: Slices) -> Tensor:
        """Read a part of the tensor ``name``."""
        return self._read(name, slices)

    def check(self, name: str, dtype: torch.dtype, shape: Sequence[int]) -> None:
        """Check that the file has ``name`` as the index says; a file without an index of its own is the index itself.

        Raises:
            CheckpointError: dtype or shape differ, so that other elements would be read, or rounded ones.
        """

    def fill(self, name: str, slices: Slices, target: Tensor) -> None:
        """Copy a part of a tensor into ``target``, which may have any shape of as many elements, any dtype and device.

        Raises:
            CheckpointError: the number of elements differs.
        """
        found = self(name, slices)
        if found.numel() != target.numel():
            raise CheckpointError(f"{self.path}: is damaged, it has another shape of {name}")
        target.copy_(found.view(target.shape))
        heartbeat()
