"""Parts of tensors out of one open file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from ...errors import CheckpointError

Part = tuple[slice, ...]


class Fetch:
    """``fetch(name, part)`` is that part of the tensor of this name within a file.

    Args:
        path: the file, for messages.
        read: does it.
    """

    def __init__(self, path: Path, read: Callable[[str, Part], Tensor]) -> None:
        self.path, self._read = path, read

    def __call__(self, name: str, part: Part) -> Tensor:
        """That part of a tensor."""
        return self._read(name, part)

    def fill(self, name: str, part: Part, target: Tensor) -> None:
        """Copy a part of a tensor into ``target``, which has as many elements and any shape, dtype and device.

        Raises:
            CheckpointError: the part has another number of elements.
        """
        found = self(name, part)
        if found.numel() != target.numel():
            raise CheckpointError(f"{self.path}: is damaged, it has another shape of {name}")
        target.copy_(found.view(target.shape))
