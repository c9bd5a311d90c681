"""Write what one process has planned to one file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ...stored_dtypes import DTYPES
from ..manifest import FileEntry
from ..safetensors_file import write_safetensors
from .planning import PlannedChunk


def described(parts: Sequence[PlannedChunk]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Name in the file to dtype and shape."""
    return {part.name: (DTYPES[part.dtype], part.box[1]) for part in parts}


def write_shard(path: Path, parts: Sequence[PlannedChunk], tensors: Iterable[Tensor]) -> FileEntry:
    """Write chunks of tensors to one safetensors file, with one of them in memory at a time."""
    return write_safetensors(path, described(parts), tensors)
