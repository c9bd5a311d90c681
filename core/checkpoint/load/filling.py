"""Fill tensors in place from the chunks of a checkpoint; a process reads what it needs, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor

from ...stored_dtypes import DTYPES
from ..held_chunks import held_chunks
from ..layouts import Box, overlap
from ..saved_tensor import SavedTensor, StoredChunk
from .partial_read import Fetch

Source = Callable[[str], AbstractContextManager[Fetch]]
"""Context that opens a file by its name."""


class _Read(NamedTuple):
    """A part of a stored chunk, and the view that it fills."""

    chunk: StoredChunk
    dtype: torch.dtype
    """In the file."""
    begins: tuple[int, ...]
    """Where the part begins in the chunk."""
    target: Tensor


@torch.no_grad()
def fill(template: Mapping[str, Tensor], entries: Mapping[str, SavedTensor], source: Source) -> None:
    """Fill what this process holds of each tensor, file by file; no communication.

    Args:
        template: key to a tensor of the stored shape, of any layout.
        entries: the stored tensors.
        source: opens the files with the chunks.

    Raises:
        CheckpointError: a file is damaged.
    """
    by_file: dict[str, list[_Read]] = {}
    for key, tensor in template.items():
        for read in _reads(key, tensor, entries[key]):
            by_file.setdefault(read.chunk.file, []).append(read)
    for file, reads in by_file.items():
        with source(file) as fetch:
            for chunk, dtype, begins, target in reads:
                fetch.check(chunk.name, dtype, chunk.shape)
                spans = zip(begins, target.shape, strict=True)
                fetch.fill(chunk.name, tuple(slice(begin, begin + size) for begin, size in spans), target)


def _reads(key: str, tensor: Tensor, entry: SavedTensor) -> Iterator[_Read]:
    for offsets, held in held_chunks(key, tensor).items():
        wanted: Box = offsets, tuple(held.shape)
        for chunk in entry.overlapping(wanted):
            found = overlap(wanted, (chunk.offsets, chunk.shape))
            assert found is not None
            target = held
            for dim, (begin, size) in enumerate(zip(*found, strict=True)):
                target = target.narrow(dim, begin - offsets[dim], size)
            begins = tuple(b - o for b, o in zip(found[0], chunk.offsets, strict=True))
            yield _Read(chunk, DTYPES[entry.dtype], begins, target)
