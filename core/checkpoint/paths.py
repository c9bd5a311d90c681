"""Paths of checkpoints: local folders, and URLs of any storage that fsspec knows (``s3://``, ``gs://``, ``memory://``).

universal_pathlib's paths have the interface of pathlib's, so that most code works with both. The differences are
handled here: remote storage cannot sync to disk or rename folders, and its files cannot be mapped into memory.
"""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from ..comm.collectives import broadcast_object, get_rank
from ..errors import CheckpointError, ConfigError, FlexTrainError, StorageError
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
