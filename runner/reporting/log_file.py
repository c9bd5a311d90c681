"""LogFile and EndFile: log files that do not end a run when their storage fails."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from ...core.log_marks import TRACEBACK_IN_FILE


class LogFile(logging.FileHandler):
    """Writes records to a file. If its storage fails, one line on stderr says so until it works again.

    Args:
        path: the file.
        delay: create the file with the first record.
    """

    def __init__(self, path: Path, delay: bool = False) -> None:
        super().__init__(path, encoding="utf-8", delay=delay)
        self._fails = self._failed = False

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        self._failed = False
        super().emit(record)
        self._fails = self._failed

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802, logging's name
        """Tell of storage that fails in one line, of other errors as logging does."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        if not self._fails:
            sys.stderr.write(f"flextrain: {self.baseFilename}: log lines are lost, {error.strerror or error}\n")
        self._failed = True

    def close(self) -> None:
        """Close the file; what a full disk did not take is lost, as ``handleError`` has said."""
        try:
            super().close()
        except OSError as error:
            if not self._fails:
                sys.stderr.write(f"flextrain: {self.baseFilename}: log lines are lost, {error.strerror or error}\n")


class EndFile(LogFile):
    """Writes how this process ended, and nothing else.

    Args:
        path: the log file, which is created only then.
        level: the lowest level of a record to write.
    """

    def __init__(self, path: Path, level: int) -> None:
        super().__init__(path, delay=True)
        self.setLevel(level)
        self.addFilter(lambda record: getattr(record, TRACEBACK_IN_FILE, False))

    def emit(self, record: logging.LogRecord) -> None:
        """Write one end."""
        try:
            Path(self.baseFilename).parent.mkdir(parents=True, exist_ok=True)
            super().emit(record)
        except OSError:  # making the folder, or opening the file
            self.handleError(record)
