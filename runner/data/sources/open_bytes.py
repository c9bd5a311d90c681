"""OpenBytes: a file that is open for reading spans of bytes."""

from __future__ import annotations

import os
from pathlib import Path

from ....core.errors import DataError


class OpenBytes:
    """Reads spans of bytes of a file; the file's position is not used, so threads may share it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, begin: int, size: int, what: object) -> bytes:
        """Return ``size`` bytes from byte ``begin``.

        Raises:
            DataError: the file ends before; the message names ``what``.
        """
        found = os.pread(self._file, size, begin)
        while len(found) < size:  # one call gives at most 2 GiB
            more = os.pread(self._file, size - len(found), begin + len(found))
            if not more:
                raise DataError(f"{self.path}: {what}: the file has become shorter since it was indexed")
            found += more
        return found

    def close(self) -> None:
        """Close the file; nothing, if it is closed."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __del__(self) -> None:
        if hasattr(self, "_file"):  # it is missing if the file could not be opened
            self.close()
