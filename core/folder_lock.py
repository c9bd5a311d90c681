"""One run at a time in a folder."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from pathlib import Path

FILE = ".flextrain.lock"

# A process's own locks do not keep itself out. By process, since a forked one is another.
_held: set[tuple[int, Path]] = set()


class OccupiedError(Exception):
    """Somebody else has the folder; the message says who."""


class FolderLock:
    """Holds a folder until ``release``, or until the process ends in whatever way.

    A POSIX lock on a small file in it, which says who holds it: the system forgets it with the process, it reaches over NFS,
    and forked processes that read data do not inherit it. Where the file system has no locks, nothing is held.

    Args:
        folder: is there, on this machine or mounted.

    Raises:
        OccupiedError: another run holds it.
    """

    def __init__(self, folder: Path) -> None:
        self._key = os.getpid(), folder.resolve()
        self._file = self._key[1] / FILE
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
            else:  # whoever had it has removed it since it was opened
                os.close(descriptor)
        _held.add(self._key)
        text = f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%m/%d %H:%M:%S')}"
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, text.encode(), 0)

    def _is_in_place(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), self._file.stat())
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Give the folder to others."""
        if self._descriptor is not None:
            self._file.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = None
            _held.discard(self._key)
