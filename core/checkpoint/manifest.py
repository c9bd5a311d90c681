"""Manifest, the index of a checkpoint: its files, and for each tensor dtype, shape and the stored chunks."""

from __future__ import annotations

import math
import re

import pydantic

from ..stored_dtypes import DTYPES
from .untrusted import check_disjoint, check_shape

FORMAT, VERSION = "flextrain-checkpoint", 1
MANIFEST, VALUES = "manifest.json", "values.json"
SHARD = re.compile(r"rank-\d{5}\.safetensors")


class _Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


class StoredChunk(_Strict):
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


class TensorEntry(_Strict):
    """Dtype, shape and chunks of a tensor of the checkpoint."""

    dtype: str
    """A name in DTYPES."""
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]

    @pydantic.field_validator("dtype")
    @classmethod
    def _known(cls, dtype: str) -> str:
        if dtype not in DTYPES:
            raise ValueError(f"tensors of {dtype} cannot be read")
        return dtype

    @pydantic.model_validator(mode="after")
    def _whole(self) -> TensorEntry:
        check_shape(self.shape)
        # Elements that no chunk covers would stay uninitialised.
        if sum(math.prod(chunk.shape) for chunk in self.chunks) != math.prod(self.shape):
            raise ValueError("its chunks are not all there")
        for chunk in self.chunks:
            ends = zip(chunk.offsets, chunk.shape, self.shape, strict=True)
            if any(offset < 0 or length < 0 or offset + length > size for offset, length, size in ends):
                raise ValueError("a chunk lies outside of it")
        check_disjoint([(chunk.offsets, chunk.shape) for chunk in self.chunks])
        return self


class FileEntry(_Strict):
    """Size and checksum of a file of the checkpoint."""

    size: int
    """In bytes."""
    xxh3: str
    """Checksum of the whole file: XXH3 with 64 bits, sixteen hexadecimal digits."""


class Manifest(_Strict):
    """The index of a checkpoint; a directory with it is a complete checkpoint."""

    format: str = FORMAT
    version: int = VERSION
    written_by: dict[str, str | int]
    """Versions, strategy and world size, for information only."""
    files: dict[str, FileEntry]
    nonfinite: tuple[str, ...] = ()
    """Keys of tensors that training should keep finite and that have NaN or infinity; written only if there are any."""
    tensors: dict[str, TensorEntry]

    @pydantic.model_validator(mode="after")
    def _held(self) -> Manifest:
        # Loading allocates memory for the declared tensors before it reads, so they must be inside their files.
        declared = dict.fromkeys(self.files, 0)
        for key, entry in self.tensors.items():
            for chunk in entry.chunks:
                if chunk.file not in declared:
                    raise ValueError(f"{key} is in {chunk.file}, which is not listed")
                declared[chunk.file] += math.prod(chunk.shape) * DTYPES[entry.dtype].itemsize
        for file, size in declared.items():
            if size > self.files[file].size:
                raise ValueError(f"{file} has {self.files[file].size} bytes and would hold tensors of {size}")
        if stray := next((key for key in self.nonfinite if key not in self.tensors), None):
            raise ValueError(f"{stray} is marked as not finite and does not exist")
        return self
