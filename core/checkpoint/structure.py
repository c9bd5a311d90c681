"""Whether a checkpoint holds what its index says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open

from ..errors import CheckpointError
from .layout import Chunk, TensorEntry, check_file, read_manifest


def damages(path: Path) -> Iterator[str]:
    """What is wrong with the checkpoint at ``path``, a sentence each, naming the file; every byte is read."""
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
    by_file: dict[str, list[tuple[str, TensorEntry, Chunk]]] = {}
    for key, entry in manifest.tensors.items():
        for chunk in entry.chunks:
            by_file.setdefault(chunk.file, []).append((key, entry, chunk))
    for file, pieces in by_file.items():
        yield from _file_damages(path / file, pieces)


def _file_damages(path: Path, pieces: list[tuple[str, TensorEntry, Chunk]]) -> Iterator[str]:
    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            for key, entry, chunk in pieces:
                if chunk.name not in names:
                    yield f"{path}: lacks {chunk.name}, a piece of {key}"
                    continue
                found = file.get_slice(chunk.name)
                if (found.get_dtype(), tuple(found.get_shape())) != (entry.dtype, chunk.shape):
                    shape = tuple(found.get_shape())
                    yield f"{path}: {chunk.name} is {found.get_dtype()} {shape} instead of {entry.dtype} {chunk.shape}"
    except (SafetensorError, OSError) as error:
        yield f"{path}: is damaged, {error}"


def size_of(path: Path) -> int:
    """Bytes of all files of a checkpoint directory."""
    return sum(file.stat().st_size for file in path.iterdir() if file.is_file())
