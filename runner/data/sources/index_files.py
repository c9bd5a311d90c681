"""Index files: arrays that are made once from a data file, kept beside it, and mapped into memory."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ....core.errors import ConfigError

Arrays = Mapping[str, np.ndarray[Any, Any]]
SUFFIX = ".ftindex"
_MAGIC = b"ftindex1"
_ALIGNED = 64

_not_kept: dict[str, Arrays] = {}
"""Indexes that no folder takes, of this process and of workers that are forked off."""
logger = logging.getLogger("flextrain")


def index_of(path: Path, kind: str, make: Callable[[], Arrays], index_dir: str | os.PathLike[str] | None) -> Arrays:
    """Return the index of a data file; made and kept at the first call, and again when the file has changed.

    Args:
        path: the data file.
        kind: what the index is of, with its version; another kind does not fit.
        make: reads the data file and returns the arrays.
        index_dir: folder of the index; None: beside the data file, or in the user's cache if that cannot be written.
    """
    stat = path.stat()
    facts = {"kind": kind, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    return kept(f"{path.name}{SUFFIX}", path.resolve(), facts, make, path.parent, index_dir)


def kept(
    name: str,
    whose: object,
    facts: Mapping[str, Any],
    make: Callable[[], Arrays],
    beside: Path | None,
    index_dir: str | os.PathLike[str] | None,
) -> Arrays:
    """Return arrays from the first folder that has them with these facts; else make them, and keep them.

    Only one process at a time makes them, where the file system has locks; the others wait and read the file.

    Args:
        name: file name of the index.
        whose: what the index is of, by which it is named in a folder for the indexes of several data.
        facts: plain values that have to be the same in the file.
        make: returns the arrays.
        beside: the folder to try first.
        index_dir: the only folder to use.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flextrain" / "index"
    folder = cache if index_dir is None else Path(index_dir).expanduser()
    if index_dir is not None and os.path.isfile(folder):  # noqa: PTH113 - Path's raises where it may not look
        raise ConfigError(f"index_dir: {folder} is a file, give a folder")
    files = [folder / f"{xxhash.xxh3_64_hexdigest(str(whose).encode())}-{name}"]  # files of one name may meet there
    if index_dir is None and beside is not None:
        files.insert(0, beside / name)
    key = f"{whose} {json.dumps(facts, sort_keys=True)}"
    if key in _not_kept:
        return _not_kept[key]
    for file in files:
        if (found := _open(file, facts)) is not None:
            return found
    made: Arrays | None = None  # once, however many folders refuse it
    for file in files:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with _alone(file):
                if (found := _open(file, facts)) is None:
                    made = make() if made is None else made
                    _write(file, facts, made)
                    found = _open(file, facts)
            if found is not None:
                return found
        except PermissionError:
            continue
        except (FileExistsError, FileNotFoundError, NotADirectoryError) as error:
            if index_dir is None:
                raise
            raise ConfigError(f"index_dir: {index_dir} is no folder and cannot be made, {error.strerror}") from None
        except OSError as error:
            if error.errno not in _CANNOT_WRITE:
                raise
    logger.warning(
        f"{whose}: its index is not kept, {one_folder(files)} cannot be written to; every start makes it anew"
    )
    _not_kept[key] = make() if made is None else made
    return _not_kept[key]


def one_folder(files: list[Path]) -> str:
    """The folders of files, for a message."""
    return " and ".join(str(file.parent) for file in files)


_CANNOT_WRITE = {30, 28, 122}  # a read-only file system, no space, no quota


@contextlib.contextmanager
def _alone(file: Path) -> Iterator[None]:
    """Context in which no other process makes this file."""
    lock = file.with_name(f".{file.name}.lock")
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: several processes make the same file
            fcntl.lockf(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        # Removed while it is held: who waits for it looks for the index first, and at worst makes it once more.
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def _write(file: Path, facts: Mapping[str, Any], arrays: Arrays) -> None:
    columns, at = {}, 0
    for name, array in arrays.items():
        columns[name] = [array.dtype.str, at, len(array)]
        at += -(-array.nbytes // _ALIGNED) * _ALIGNED
    header = json.dumps({"facts": facts, "columns": columns, "bytes": at}).encode()
    begin = -(-(len(_MAGIC) + 8 + len(header)) // _ALIGNED) * _ALIGNED
    temporary = file.with_name(f".{file.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("wb") as out:
            out.write(_MAGIC + len(header).to_bytes(8, "little") + header)
            for (_, offset, _), array in zip(columns.values(), arrays.values(), strict=True):
                out.seek(begin + offset)
                out.write(np.ascontiguousarray(array).data)
            out.truncate(begin + at)
            out.flush()
            os.fsync(out.fileno())
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def _open(file: Path, facts: Mapping[str, Any]) -> Arrays | None:
    """The arrays of an index file, mapped into memory; None if it is missing, damaged, or of other data."""
    try:
        with file.open("rb") as opened:
            if opened.read(len(_MAGIC)) != _MAGIC:
                return None
            length = int.from_bytes(opened.read(8), "little")
            begin = -(-(len(_MAGIC) + 8 + length) // _ALIGNED) * _ALIGNED
            if length > 2**24:
                return None
            header = json.loads(opened.read(length))
            if header["facts"] != json.loads(json.dumps(facts)) or file.stat().st_size != begin + header["bytes"]:
                return None
        return {
            # A view without memmap's own methods is read faster.
            name: np.asarray(np.memmap(file, np.dtype(kind), "r", begin + offset, (count,)))
            if count
            else np.empty(0, kind)
            for name, (kind, offset, count) in header["columns"].items()
        }
    except (OSError, ValueError, KeyError, TypeError):
        return None
