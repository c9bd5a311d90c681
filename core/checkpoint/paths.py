"""Where checkpoints are: a folder of this machine, or of any storage that fsspec reaches (``s3://``, ``gs://``, ``memory://``).

universal_pathlib's paths do what those of pathlib do, so that most of the code need not know. What differs is here: other
storage has no flush to the disk and no renaming of folders, and its files cannot be mapped into memory.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from ..comm.collectives import broadcast_object, get_rank
from ..errors import CheckpointError, ConfigError, FlexTrainError
from .untrusted import one_line

REMOTE = "://"


def place(path: str | os.PathLike[str]) -> Path:
    """``path`` as an absolute Path, or as what behaves like one for a URL.

    Raises:
        CheckpointError: a URL, and universal_pathlib or what it needs for this kind of storage is not installed.
    """
    if not isinstance(path, Path) and REMOTE in str(path):
        url = str(path)
        if url.startswith("file://"):
            return Path(url.removeprefix("file://")).absolute()
        try:
            from upath import UPath

            found = UPath(path)
            assert found.fs is not None  # made when it is first asked for
        except (ImportError, ValueError) as error:
            raise CheckpointError(
                f"{url}: cannot be reached, {one_line(error)}; pip install flextrain[remote], and fsspec's package for "
                "this kind of storage"
            ) from None
        return cast(Path, found)
    return Path(path).absolute()


def is_local(path: Path) -> bool:
    """Whether ``path`` is in a file system of this machine."""
    return isinstance(path, Path)


@contextmanager
def reaching(path: Path) -> Iterator[None]:
    """Around the first use of a URL: each kind of storage has errors of its own, and no common class of them.

    Raises:
        CheckpointError: in place of them, on one line that names the URL and their kind; a local path's are left as they are.
    """
    try:
        yield
    except Exception as error:
        if is_local(path) or isinstance(error, FlexTrainError):
            raise
        reason = one_line(error)
        kind = type(error).__name__
        raise CheckpointError(f"{path}: cannot be reached, {kind}{f': {reason}' if reason else ''}") from error


def make_writable(folder: Path, key: str) -> None:
    """Make a folder and write a file to it, which is removed again, on rank 0; every process must call it.

    Args:
        folder: a path or URL.
        key: the configuration's, for the message.

    Raises:
        ConfigError: on every process; it cannot be written to.
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
    """Delete a folder with all that is in it, as far as it is there."""
    if is_local(path):
        shutil.rmtree(path, ignore_errors=True)
    elif path.exists():
        cast(Any, path).fs.rm(cast(Any, path).path, recursive=True)
