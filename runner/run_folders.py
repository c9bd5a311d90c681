"""Folders of a run, which no other run shares without knowing."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ..core.checkpoint import is_local
from ..core.comm.collectives import broadcast_object, is_main
from ..core.errors import ConfigError
from ..core.folder_lock import FolderLock, OccupiedError


def new_log_folder(work_dir: Path) -> str:
    """The name of a new folder in the work directory: the time, numbered if another run began in the same second.

    Every process must call it, and gets rank 0's.
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


@contextmanager
def occupied(folders: Sequence[Path]) -> Iterator[None]:
    """Let no other run train in these folders meanwhile; every process must come here, rank 0 holds them.

    Storage that is no file system has no locks and is left out.

    Raises:
        ConfigError: on every process; another run trains in one of them.
    """
    with ExitStack() as stack:
        problem = None
        if is_main():
            for folder in dict.fromkeys(folder for folder in folders if is_local(folder)):
                try:
                    folder.mkdir(parents=True, exist_ok=True)
                    stack.callback(FolderLock(folder).release)
                except OccupiedError as owner:
                    problem = f"{folder} is where another run trains at the moment: {owner}"
                    break
                except OSError:
                    pass  # whether it can be written to at all is asked where checkpoints are saved
        if problem := broadcast_object(problem):
            raise ConfigError(f"work_dir: {problem}; give another one, or wait until that has ended")
        yield
