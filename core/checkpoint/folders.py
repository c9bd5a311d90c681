"""Folders of checkpoints: paths, local or of any storage that fsspec knows, locks, and the names of files.

universal_pathlib's paths have the interface of pathlib's, so that most code works with both. The differences are
handled here: remote storage cannot sync to disk or rename folders, and its files cannot be mapped into memory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from ..base.errors import CheckpointError, ConfigError, FlexTrainError, StorageError
from ..comm.collectives import broadcast_object, get_rank
from .untrusted import one_line

REMOTE = "://"


def as_path(path: str | os.PathLike[str]) -> Path:
    """``path`` as an absolute Path; a URL as universal_pathlib's UPath, which has the same interface.

    Raises:
        CheckpointError: universal_pathlib, or fsspec's package for this kind of URL, is not installed.
    """
    if not isinstance(path, Path) and REMOTE in str(path):
        url = str(path)
        if url.startswith("file://"):
            return Path(url.removeprefix("file://")).absolute()
        try:
            from upath import UPath

            found = UPath(path)
            assert found.fs is not None  # the first access makes it, and may raise
        except (ImportError, ValueError) as error:
            raise CheckpointError(
                f"{url}: cannot be reached, {one_line(error)}; pip install flextrain[remote], and fsspec's package for "
                "this kind of storage"
            ) from None
        return cast(Path, found)
    return Path(path).absolute()


def is_local(path: Path) -> bool:
    """Whether ``path`` is in a local or mounted file system."""
    return isinstance(path, Path)


@contextmanager
def reaching(path: Path) -> Iterator[None]:
    """Context for access to a URL: every kind of storage has its own exceptions, without a common base.

    Raises:
        StorageError: instead of them, one line with the URL and their class; those of a local path do not change.
    """
    try:
        yield
    except Exception as error:
        if is_local(path) or isinstance(error, FlexTrainError):
            raise
        reason = one_line(error)
        kind = type(error).__name__
        raise StorageError(f"{path}: cannot be reached, {kind}{f': {reason}' if reason else ''}") from error


def make_writable(folder: Path, key: str) -> None:
    """Make a folder on rank 0, and check that a file can be written to it; every process must call it.

    Args:
        folder: a path or URL.
        key: the configuration key, for the message.

    Raises:
        ConfigError: on every process, if the folder cannot be written to.
    """
    reason = None
    if get_rank() == 0:
        try:
            with reaching(folder):
                folder.mkdir(parents=True, exist_ok=True)
                trial = folder / f".{uuid.uuid4().hex}.tmp"
                trial.write_bytes(b"")
                trial.unlink()
        except CheckpointError as error:
            reason = str(error)
        except OSError as error:
            reason = f'"{folder}" cannot be written to, {error.strerror or error}'
    if reason := broadcast_object(reason):
        raise ConfigError(f"{key}: {reason}")


def remove_tree(path: Path) -> None:
    """Delete a folder and its content; nothing happens if it does not exist."""
    if is_local(path):
        shutil.rmtree(path, ignore_errors=True)
    elif path.exists():
        try:
            cast(Any, path).fs.rm(cast(Any, path).path, recursive=True)
        except OSError as error:
            # A listing that lags behind names files that are gone, or lacks some that are there.
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY) and not isinstance(error, FileNotFoundError):
                raise


# A lock on a folder, so that only one run at a time uses it.


FILE = ".flextrain.lock"

# A POSIX lock does not exclude its own process. The process id is in the key, because a fork inherits this set.
_held: set[tuple[int, Path]] = set()


class OccupiedError(Exception):
    """Another run holds the folder; the message says which."""


def owner_of(folder: Path) -> str | None:
    """What the lock file of a folder says: the process and machine that hold it; None if there is none, or it is ours."""
    if (os.getpid(), folder.resolve() / FILE) in _held:  # closing the file would release this process's lock on it
        return None
    try:
        return (folder / FILE).read_text(errors="replace")[:200].strip() or None
    except OSError:
        return None


class FolderLock:
    """Holds a folder until ``release``, or until the process ends in any way.

    It is a POSIX lock on a small file that says who holds the folder. The system releases it with the process, it works
    over NFS, and forked dataloader workers do not inherit it. On a file system without locks nothing is held.

    Args:
        folder: an existing folder, local or mounted.
        name: of the lock's file; what is held under another one is another lock.

    Raises:
        OccupiedError: another run holds it.
    """

    def __init__(self, folder: Path, name: str = FILE) -> None:
        self._file = folder.resolve() / name
        self._key = os.getpid(), self._file
        self._descriptor: int | None = None
        if self._key in _held:
            raise OccupiedError(f"another run of this process ({os.getpid()})")
        while self._descriptor is None:
            descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                owner = os.pread(descriptor, 200, 0).decode(errors="replace")
                os.close(descriptor)
                if error.errno in (errno.EACCES, errno.EAGAIN):
                    raise OccupiedError(owner or "another process") from None
                return
            if self._is_in_place(descriptor):
                self._descriptor = descriptor
            else:  # its former owner has removed the file since it was opened here
                os.close(descriptor)
        _held.add(self._key)
        text = f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%m/%d %H:%M:%S')}"
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, text.encode(), 0)

    @property
    def is_held(self) -> bool:
        """Whether the folder is locked; False on a file system without locks, and after ``release``."""
        return self._descriptor is not None

    def _is_in_place(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), self._file.stat())
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Release the folder, and remove the lock file."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):  # a read-only file system; without its lock the file locks nothing
                self._file.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = None
            _held.discard(self._key)


# The names of the files that processes write, and of the chunks in them.


SHARD = re.compile(r"rank-\d{5}\.safetensors")


def file_of(rank: int) -> str:
    """Name of the file that ``rank`` writes."""
    return f"rank-{rank:05d}.safetensors"


def name_in_file(key: str, box: tuple[Sequence[int], Sequence[int]], shape: Sequence[int]) -> str:
    """Name of a chunk in its file: the tensor's key, with the offsets if it is not the whole tensor."""
    offsets, sizes = box
    return key if tuple(sizes) == tuple(shape) else f"{key}@{','.join(map(str, offsets))}"


def remove_if_empty(folder: Path) -> None:
    """Remove a folder, unless something is in it."""
    with contextlib.suppress(OSError):
        folder.rmdir()
