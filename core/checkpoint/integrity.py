"""Verify a checkpoint: compare all files with its index and checksums."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ..errors import CheckpointError
from ..stored_dtypes import DTYPE_NAMES
from .directory import check_file, read_manifest
from .safetensors_file import SafetensorsFile
from .saved_tensor import SavedTensor, StoredChunk


def damages(path: Path) -> Iterator[str]:
    """Yield one sentence for each damage of the checkpoint at ``path``, with the file's name; every byte is read."""
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        yield str(error)
        return
    for file, written in manifest.files.items():
        try:
            check_file(path / file, written)
        except CheckpointError as error:
            yield str(error)
    by_file: dict[str, list[tuple[str, SavedTensor, StoredChunk]]] = {}
    for key, entry in manifest.entries.items():
        for chunk in entry.chunks:
            by_file.setdefault(chunk.file, []).append((key, entry, chunk))
    for file, chunks in by_file.items():
        yield from _file_damages(path / file, chunks)


def _file_damages(path: Path, chunks: list[tuple[str, SavedTensor, StoredChunk]]) -> Iterator[str]:
    try:
        with path.open("rb") as file:
            tensors = SafetensorsFile(path, file).tensors
    except (CheckpointError, OSError) as error:
        yield str(error) if isinstance(error, CheckpointError) else f"{path}: cannot be read, {error.strerror or error}"
        return
    for key, entry, chunk in chunks:
        if chunk.name not in tensors:
            yield f"{path}: lacks {chunk.name}, a chunk of {key}"
            continue
        dtype, shape = DTYPE_NAMES[tensors[chunk.name][0]], tensors[chunk.name][1]
        if (dtype, shape) != (entry.dtype, chunk.shape):
            yield f"{path}: {chunk.name} is {dtype} {shape} instead of {entry.dtype} {chunk.shape}"


def size_of(path: Path) -> int:
    """Size of all files of a checkpoint directory, in bytes."""
    return sum(file.stat().st_size for file in path.iterdir() if file.is_file())
