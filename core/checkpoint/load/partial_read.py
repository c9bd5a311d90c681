"""Read parts of tensors from an open file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from ...errors import CheckpointError

Part = tuple[slice, ...]


class Fetch:
    """Reads parts of tensors from one file: ``fetch(name, part)``.

    Args:
        path: the file, for messages.
        read: function that reads a part of a tensor.
    """

    def __init__(self, path: Path, read: Callable[[str, Part], Tensor]) -> None:
        self.path, self._read = path, read

    def __call__(self, name: str, part: Part) -> Tensor:
        """Read a part of the tensor ``name``."""
        return self._read(name, part)

    def fill(self, name: str, part: Part, target: Tensor) -> None:
        """Copy a part of a tensor into ``target``, which may have any shape of as many elements, any dtype and device.

        Raises:
            CheckpointError: the number of elements differs.
        """
        found = self(name, part)
        if found.numel() != target.numel():
            raise CheckpointError(f"{self.path}: is damaged, it has another shape of {name}")
        target.copy_(found.view(target.shape))
