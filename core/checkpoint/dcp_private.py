"""All private names of torch.distributed.checkpoint that flextrain uses.

Each entry says what it does, and with which versions of torch it was checked, as in core.torch_private.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint.filesystem import _StorageInfo


def bytes_in_file(file: str, offset: int, length: int) -> Any:
    """Where an item is, as the index of a folder says it. 2.6, 2.15."""
    return _StorageInfo(file, offset, length)
