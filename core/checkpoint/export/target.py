"""The folder that an export writes: by one export at a time, and complete or as it was before."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from ...errors import CheckpointError
from ...folder_lock import FolderLock, OccupiedError
from ..directory import sync_directory

_STAGED = ".flextrain_export"
# Not that of a run, which may export to its own work_dir.
_LOCK = ".flextrain_export.lock"


_FILES = (".safetensors", ".pth", ".pt", ".bin")


def local_target(given: str | os.PathLike[str]) -> Path:
    """Return what an export shall write as a path.

    Raises:
        CheckpointError: it is a URL, or empty.
    """
    if "://" in os.fspath(given):
        raise CheckpointError(f"{given}: is a URL, and exports write to local files; give a path, and copy it there")
    if not os.fspath(given):
        raise CheckpointError('"": is not allowed, give the name of what is to be written')
    return Path(given)


def local_folder(given: str | os.PathLike[str]) -> Path:
    """Return the folder that an export shall write.

    Raises:
        CheckpointError: it is a URL, or empty, or has the name of a file with weights.
    """
    path = local_target(given)
    if path.suffix.lower() in _FILES and not path.exists():
        raise CheckpointError(
            f"{path}: has the name of a file, and this export writes a folder; leave out {path.suffix}"
        )
    return path


def make(folder: Path, target: Path) -> None:
    """Make a folder and those around it, for ``target``.

    Raises:
        CheckpointError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        file = next(path for path in (folder, *folder.parents) if path.is_file())
        raise CheckpointError(f"{target}: could not be written, {file} is a file") from None
    except OSError as error:
        raise CheckpointError(f"{target}: could not be written, {error.strerror or error}") from error


def check_free(folder: Path, patterns: Iterable[str], allowed: str = "a folder") -> None:
    """Check that a folder has no file of such a name, or is not there yet.

    What an export has left that was killed does not count.

    Raises:
        CheckpointError: it has one, or it is no folder.
    """
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder}: is a file, give {allowed}")
    for pattern in patterns:
        for file in sorted(folder.glob(pattern)):
            if file.name not in (_STAGED, _LOCK):
                raise CheckpointError(f"{file}: is there already, give another folder")


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Context in which no other export writes to a folder, which is made; if it is empty at the end, it is removed.

    Raises:
        CheckpointError: another export writes to it, or it cannot be made.
    """
    is_new = not folder.exists()
    make(folder, folder)
    try:
        lock = FolderLock(folder, _LOCK)
    except OccupiedError as error:
        raise CheckpointError(f"{folder}: is being written by {error}, give another folder") from None
    except OSError as error:
        raise CheckpointError(f"{folder}: could not be written, {error.strerror or error}") from error
    with ExitStack() as stack:
        if is_new:
            stack.callback(_remove_empty, folder)
        stack.callback(lock.release)
        yield


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):  # something is in it
        folder.rmdir()


@contextmanager
def filled(folder: Path, last: str, patterns: Iterable[str]) -> Iterator[Path]:
    """Context with an empty folder, whose files are moved to ``folder`` at its end; an error leaves ``folder`` as it was.

    Args:
        folder: a folder that is ``claimed``.
        last: the name of the file that is moved when all others are there.
        patterns: see ``check_free``; another export may have been faster.

    Raises:
        CheckpointError: there is such a file, or the disk is full, or fails.
    """
    check_free(folder, patterns)
    staged = folder / _STAGED
    try:
        shutil.rmtree(staged, ignore_errors=True)  # of an export that was killed
        staged.mkdir()
        yield staged
        for file in sorted(staged.iterdir(), key=lambda file: (file.name == last, file.name)):
            if file.is_dir():
                shutil.copytree(file, folder / file.name, dirs_exist_ok=True)
            else:
                file.replace(folder / file.name)
        sync_directory(folder)
    except OSError as error:
        raise CheckpointError(f"{folder}: could not be written, {error.strerror or error}") from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)
