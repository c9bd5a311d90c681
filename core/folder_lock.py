"""A lock on a folder, so that only one run at a time uses it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import time
from pathlib import Path

FILE = ".flextrain.lock"

# A POSIX lock does not exclude its own process. The process id is in the key, because a fork inherits this set.
_held: set[tuple[int, Path]] = set()


class OccupiedError(Exception):
    """Another run holds the folder; the message says which."""


def owner_of(folder: Path) -> str | None:
    """What the lock file of a folder says: the process and machine that hold it; None if there is none, or it is ours."""
    try:
        text = (folder / FILE).read_text(errors="replace")[:200].strip()
    except OSError:
        return None
    own = f"process {os.getpid()} on {socket.gethostname()} "
    return None if not text or text.startswith(own) else text


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
