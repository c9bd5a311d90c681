"""Write what one process has planned to one file."""

from __future__ import annotations

import errno
import math
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ...byte_sizes import size_text
from ...errors import CheckpointError
from ...stored_dtypes import DTYPES
from ..manifest import FileEntry
from ..paths import is_local
from ..safetensors_file import write_safetensors
from .planning import PlannedChunk


def described(parts: Sequence[PlannedChunk]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Name in the file to dtype and shape.

    Raises:
        CheckpointError: two chunks have one name, as the first of ``a`` and a tensor ``a@0`` have.
    """
    found = {part.name: (DTYPES[part.dtype], part.box[1]) for part in parts}
    if len(found) < len(parts):
        names = [part.name for part in parts]
        name = next(name for name in names if names.count(name) > 1)
        keys = " and ".join(part.key for part in parts if part.name == name)
        raise CheckpointError(f"{keys}: would both be {name} in a file; give one of them another name")
    return found


def write_shard(path: Path, parts: Sequence[PlannedChunk], tensors: Iterable[Tensor]) -> FileEntry:
    """Write chunks of tensors to one safetensors file, with one of them in memory at a time."""
    header = described(parts)
    try:
        return write_safetensors(path, header, tensors)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not is_local(path):
            raise
        found = path.stat().st_size if path.exists() else 0
        size = size_text(sum(dtype.itemsize * math.prod(shape) for dtype, shape in header.values()))
        room = size_text(found + shutil.disk_usage(path.parent).free)
        raise OSError(error.errno, f"{error.strerror}: its file needs {size}, and {room} were free") from None
