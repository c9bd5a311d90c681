"""Folders of a run: a new log folder, and locks against a second run in the same folder."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from ..core.checkpoint import is_local
from ..core.comm.collectives import broadcast_object, is_main
from ..core.errors import ConfigError
from ..core.folder_lock import FolderLock, OccupiedError


def new_log_folder(work_dir: Path) -> str:
    """Make a log folder named by the time, with a number if another run began in the same second; return its name.

    A collective: every process gets the name from rank 0.
    """
    name = ""
    if is_main():
        stamp, number = time.strftime("%Y%m%d_%H%M%S"), 1
        name = stamp
        while not _is_new(work_dir / name):
            number += 1
            name = f"{stamp}_{number}"
    return broadcast_object(name)


def _is_new(folder: Path) -> bool:
    try:
        folder.mkdir()
    except FileExistsError:
        return False
    return True


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


@contextmanager
def occupied(folders: Sequence[Path], fast: Path | None = None) -> Iterator[None]:
    """Lock the folders against other runs during the block; a collective, rank 0 holds the locks.

    ``fast``, the folder of the second tier of checkpoints, is locked too, and removed if it is empty afterwards.

    Remote storage without a file system has no locks and is skipped.

    Raises:
        ConfigError: on every process, if another run trains in one of the folders.
    """
    with ExitStack() as stack:
        problem = None
        if is_main():
            if fast is not None:
                stack.callback(_remove_if_empty, fast)
            given = (*folders, fast) if fast is not None else folders
            for folder in dict.fromkeys(folder for folder in given if is_local(folder)):
                try:
                    folder.mkdir(parents=True, exist_ok=True)
                    stack.callback(FolderLock(folder).release)
                except OccupiedError as owner:
                    problem = f"{folder} is where another run trains at the moment: {owner}"
                    break
                except OSError:
                    pass  # whether it is writable is checked before checkpoints are saved
        if problem := broadcast_object(problem):
            raise ConfigError(f"work_dir: {problem}; give another one, or wait until that has ended")
        yield
