"""Checks of untrusted input: names of files, shapes of tensors, and JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..base.errors import CheckpointError

# Enough for plain values and for names and shapes; larger data should be tensors.
MAX_JSON_BYTES = 256 * 2**20


_MAX_DIMENSIONS = 64
_MAX_NAME = 255
_MAX_NUMEL = 2**62


def is_name_in_folder(name: str) -> bool:
    """Whether ``name`` is a valid name of an entry directly in a directory."""
    is_special = name in ("", ".", "..") or len(name) > _MAX_NAME or bool(set(name) & {"\0", "\\", "\n"})
    return not is_special and name == Path(name).name


def sibling(path: Path, name: str) -> Path:
    """The file ``name`` in the folder of ``path``, an index that names it.

    Raises:
        CheckpointError: the name or a link leads out of the folder, or the file does not exist.
    """
    if not is_name_in_folder(name):
        raise CheckpointError(f"{path}: names {name[:200]!r}, which is not a file in its folder")
    file = path.with_name(name)
    if not file.is_file():
        raise CheckpointError(f"{file}: is missing, {path.name} names it")
    # Remote storage (a UPath, which has an attribute fs) has no links.
    if getattr(file, "fs", None) is None and not any(
        file.resolve().is_relative_to(folder) for folder in _homes(path.parent)
    ):
        raise CheckpointError(f"{file}: is a link to a file outside of {path.parent}")
    return file


def _homes(folder: Path) -> list[Path]:
    """The folders that may have the files of ``folder``: itself, and where links in Hugging Face's cache lead.

    The cache has ``models--x/snapshots/<revision>/`` with links to ``models--x/blobs/``.
    """
    real = folder.resolve()
    is_cache = real.parent.name == "snapshots"
    return [real, real.parent.parent / "blobs"] if is_cache else [real]


def read_name(path: Path) -> str | None:
    """The name in a small text file; None if it is not a valid name of an entry directly in a directory."""
    with path.open("rb") as file:
        name = file.read(4096).decode(errors="replace").strip()
    return name if is_name_in_folder(name) else None


def check_shape(shape: Sequence[int]) -> None:
    """Raise ValueError for an impossible shape."""
    if len(shape) > _MAX_DIMENSIONS or any(size < 0 for size in shape):
        raise ValueError("it has a shape that no tensor has")
    if math.prod(size for size in shape if size) > _MAX_NUMEL:
        raise ValueError("it has more elements than any memory")


def check_disjoint(chunks: Sequence[tuple[Sequence[int], Sequence[int]]]) -> None:
    """Raise ValueError if two of the chunks, given as (offsets, sizes), share an element.

    Their sizes add up to that of the tensor, so an overlap would leave other elements uninitialised.
    """
    filled = [chunk for chunk in chunks if 0 not in chunk[1]]
    if len(filled) < 2:
        return
    dimensions = range(len(filled[0][0]))
    if not dimensions:
        raise ValueError("two of its chunks overlap")
    # Sorted along the dimension with the most cuts, few chunks have to be compared.
    along = max(dimensions, key=lambda d: len({offsets[d] for offsets, _ in filled}))
    open_chunks: list[tuple[Sequence[int], Sequence[int]]] = []
    for chunk in sorted(filled, key=lambda chunk: chunk[0][along]):
        open_chunks = [other for other in open_chunks if other[0][along] + other[1][along] > chunk[0][along]]
        if any(_overlap(chunk, other) for other in open_chunks):
            raise ValueError("two of its chunks overlap")
        open_chunks.append(chunk)


def _overlap(a: tuple[Sequence[int], Sequence[int]], b: tuple[Sequence[int], Sequence[int]]) -> bool:
    return all(x < y + m and y < x + n for x, n, y, m in zip(*a, *b, strict=True))


def one_line(text: object) -> str:
    """Untrusted text on one line of at most 300 characters, for a message."""
    return " ".join(str(text).split())[:300]


def read_limited(path: Path) -> bytes:
    """The content of a file.

    Raises:
        CheckpointError: the file is missing, or larger than 256 MiB.
    """
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: has {size} bytes, more than {MAX_JSON_BYTES} are not read")
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read, {error.strerror or error}") from None


def parse_json(path: Path, text: bytes) -> Any:
    """The value of a JSON text, which was read from ``path``.

    Raises:
        CheckpointError: it is not JSON, or nested too deeply.
    """
    try:
        return json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{path}: is damaged, {error}") from None
    except RecursionError:
        raise CheckpointError(f"{path}: is damaged, it is nested too deeply") from None


def read_json(path: Path) -> Any:
    """The content of a JSON file.

    Raises:
        CheckpointError: the file is missing, not JSON, nested too deeply, or larger than 256 MiB.
    """
    return parse_json(path, read_limited(path))
