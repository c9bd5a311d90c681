"""SwapFolder: a process's own sub-folder for swap files, which is removed at the end, or by the next run after a kill."""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import shutil
import socket
from pathlib import Path

from ...core.errors import StrategyError
from ...core.folder_lock import FolderLock, OccupiedError

logger = logging.getLogger("flextrain")

_PREFIX = "flextrain_swap_"
_ATTEMPTS = 20


class SwapFolder:
    """A new sub-folder that no other process uses, locked until ``remove`` or the end of this process.

    Sub-folders of processes that were killed are removed first; the locks tell them from those in use.

    Args:
        parent: the folder that the user gave.

    Raises:
        StrategyError: no sub-folder can be created.
    """

    def __init__(self, parent: Path) -> None:
        remove_left_over(parent)
        self._process = os.getpid()
        self.path, self._lock = _locked_folder(parent)
        atexit.register(self.remove)

    def remove(self) -> None:
        """Remove the folder with all files; may be called again. A forked process leaves it alone."""
        atexit.unregister(self.remove)
        if os.getpid() == self._process:
            shutil.rmtree(self.path, ignore_errors=True)
            self._lock.release()


def remove_left_over(parent: Path) -> None:
    """Remove the sub-folders of processes that have ended without doing so."""
    for folder in sorted(parent.glob(f"{_PREFIX}*")):
        try:
            lock = FolderLock(folder)
        except (OccupiedError, OSError):  # in use, just removed by another process, or of another user
            continue
        # Without locks, as on some network file systems, nobody knows whether it is in use.
        if lock.is_held:
            shutil.rmtree(folder, ignore_errors=True)
            logger.info("Removed %s, the swap files of a process that ended without removing them", folder)
        lock.release()


def _locked_folder(parent: Path) -> tuple[Path, FolderLock]:
    for _ in range(_ATTEMPTS):
        path = parent / f"{_PREFIX}{socket.gethostname()}_{os.getpid()}_{secrets.token_hex(4)}"
        try:
            path.mkdir(mode=0o700)
            return path, FolderLock(path)
        except (OccupiedError, FileNotFoundError):
            continue  # another process that starts now took it for left over before it was locked
        except OSError as error:
            raise StrategyError(f"{path}: cannot be created for swap files, {error.strerror}") from error
    raise StrategyError(f"{parent}: swap files need a sub-folder, and other processes remove every new one at once")
