"""Guards for what others may have written: names of files, and JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import CheckpointError

# Plain values and lists of names and shapes; what is larger belongs into tensors.
MAX_JSON_BYTES = 256 * 2**20


_MAX_DIMENSIONS = 64
_MAX_NAME = 255
_MAX_NUMEL = 2**62


def is_plain_name(name: str) -> bool:
    """Whether a name is that of something directly in a directory."""
    is_special = name in ("", ".", "..") or len(name) > _MAX_NAME or bool(set(name) & {"\0", "\\", "\n"})
    return not is_special and name == Path(name).name


def sibling(path: Path, name: str) -> Path:
    """The file called ``name`` that lies beside ``path``, which names it.

    Raises:
        CheckpointError: the name leads elsewhere, itself or through a link, or there is no such file.
    """
    if not is_plain_name(name):
        raise CheckpointError(f"{path}: names {name[:200]!r}, which is no file beside it")
    file = path.with_name(name)
    if not file.is_file():
        raise CheckpointError(f"{file}: is missing, {path.name} names it")
    # Other storage than this machine's (no Path, though it behaves as one) has no links.
    if getattr(file, "fs", None) is None and not any(
        file.resolve().is_relative_to(folder) for folder in _homes(path.parent)
    ):
        raise CheckpointError(f"{file}: is a link to a file outside of {path.parent}")
    return file


def _homes(folder: Path) -> list[Path]:
    """Where the files of a folder may be: in it, and where the cache of Hugging Face's hub links to.

    The cache has ``models--x/snapshots/<revision>/`` with links to ``models--x/blobs/``.
    """
    real = folder.resolve()
    is_cache = real.parent.name == "snapshots"
    return [real, real.parent.parent / "blobs"] if is_cache else [real]


def read_name(path: Path) -> str | None:
    """The name that a small text file holds; None if it is no name of something directly in a directory."""
    with path.open("rb") as file:
        name = file.read(4096).decode(errors="replace").strip()
    return name if is_plain_name(name) else None


def check_shape(shape: Sequence[int]) -> None:
    """Raise ValueError for a shape that no tensor has."""
    if len(shape) > _MAX_DIMENSIONS or any(size < 0 for size in shape):
        raise ValueError("it has a shape that no tensor has")
    if math.prod(size for size in shape if size) > _MAX_NUMEL:
        raise ValueError("it has more elements than any memory")


def check_disjoint(pieces: Sequence[tuple[Sequence[int], Sequence[int]]]) -> None:
    """Raise ValueError if two of the rectangles, given as (offsets, sizes), share an element.

    Their sizes add up to the tensor's, so that what one covers twice would leave a hole with whatever was in memory.
    """
    filled = [piece for piece in pieces if 0 not in piece[1]]
    if len(filled) < 2:
        return
    dimensions = range(len(filled[0][0]))
    if not dimensions:
        raise ValueError("two of its pieces overlap")
    # Along the dimension that it is cut most, few pieces meet.
    along = max(dimensions, key=lambda d: len({offsets[d] for offsets, _ in filled}))
    open_pieces: list[tuple[Sequence[int], Sequence[int]]] = []
    for piece in sorted(filled, key=lambda piece: piece[0][along]):
        open_pieces = [other for other in open_pieces if other[0][along] + other[1][along] > piece[0][along]]
        if any(_overlap(piece, other) for other in open_pieces):
            raise ValueError("two of its pieces overlap")
        open_pieces.append(piece)


def _overlap(a: tuple[Sequence[int], Sequence[int]], b: tuple[Sequence[int], Sequence[int]]) -> bool:
    return all(x < y + m and y < x + n for x, n, y, m in zip(*a, *b, strict=True))


def one_line(text: object) -> str:
    """What others wrote, fit for a message."""
    return " ".join(str(text).split())[:300]


def read_json(path: Path) -> Any:
    """The content of a JSON file.

    Raises:
        CheckpointError: it is not there, no JSON, nested too deeply, or larger than 256 MiB.
    """
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: has {size} bytes, more than {MAX_JSON_BYTES} are not read")
        return json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read, {error.strerror or error}") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: is damaged, {error}") from None
    except RecursionError:
        raise CheckpointError(f"{path}: is damaged, it is nested too deeply") from None
