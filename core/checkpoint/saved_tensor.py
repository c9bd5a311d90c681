"""A tensor of a checkpoint: dtype, shape, and the chunks that files have of it, as a list or as a layout."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import pydantic

from ..stored_dtypes import DTYPES
from .layouts import Box, Layout, Strict, check_boxes, overlap
from .names_in_files import SHARD, file_of, name_in_file
from .untrusted import check_shape


class StoredChunk(Strict):
    """A chunk of a tensor, with its file and its name there."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    name: str
    """Name of the chunk in the file."""

    @pydantic.field_validator("file")
    @classmethod
    def _inside(cls, file: str) -> str:
        if not SHARD.fullmatch(file):
            raise ValueError(f'"{file}" is no name of a shard')
        return file


class SavedTensor(Protocol):
    """What loading asks a tensor of a checkpoint."""

    @property
    def dtype(self) -> str:
        """A name in DTYPES."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""

    @property
    def chunks(self) -> Sequence[StoredChunk]:
        """All chunks; as many as there are processes, and more."""

    @property
    def chunk_count(self) -> int:
        """Number of all chunks."""

    def overlapping(self, box: Box) -> Iterator[StoredChunk]:
        """Yield the chunks that share elements with a box."""


class TensorEntry(Strict):
    """A tensor whose chunks are listed, as in format 1 and in foreign files."""

    dtype: str
    """A name in DTYPES."""
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]

    @pydantic.field_validator("dtype")
    @classmethod
    def _known(cls, dtype: str) -> str:
        return known_dtype(dtype)

    @pydantic.model_validator(mode="after")
    def _whole(self) -> TensorEntry:
        check_shape(self.shape)
        check_boxes([(chunk.offsets, chunk.shape) for chunk in self.chunks], self.shape)
        return self

    @property
    def chunk_count(self) -> int:
        """See SavedTensor."""
        return len(self.chunks)

    def overlapping(self, box: Box) -> Iterator[StoredChunk]:
        """See SavedTensor."""
        return (chunk for chunk in self.chunks if overlap((chunk.offsets, chunk.shape), box) is not None)


@dataclass(frozen=True)
class LaidOutTensor:
    """A tensor whose chunks follow from a layout, and so do their files and names.

    Attributes:
        key: its key in the checkpoint that was saved, from which the names in the files are made.
        rank: of the process from which the layout counts.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    layout: Layout
    rank: int

    @property
    def chunks(self) -> tuple[StoredChunk, ...]:
        """See SavedTensor."""
        return tuple(self._stored(rank, box) for rank, box in self.layout.chunks(self.shape))

    @property
    def chunk_count(self) -> int:
        """See SavedTensor."""
        return self.layout.count(self.shape)

    @property
    def nbytes(self) -> int:
        """Size of the whole tensor in bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def overlapping(self, box: Box) -> Iterator[StoredChunk]:
        """See SavedTensor."""
        return (self._stored(rank, found) for rank, found in self.layout.overlapping(self.shape, box))

    def of_rank(self, rank: int) -> Iterator[Box]:
        """Yield the chunks that a process writes."""
        return self.layout.chunks_of(self.shape, rank - self.rank)

    def _stored(self, rank: int, box: Box) -> StoredChunk:
        name, file = name_in_file(self.key, box, self.shape), file_of(rank + self.rank)
        # Not validated again, one by one: the layout is.
        return StoredChunk.model_construct(offsets=box[0], shape=box[1], file=file, name=name)


def known_dtype(dtype: str) -> str:
    """Return the name of a dtype; raise ValueError if checkpoints do not support it."""
    if dtype not in DTYPES:
        raise ValueError(f"tensors of {dtype} cannot be read")
    return dtype
