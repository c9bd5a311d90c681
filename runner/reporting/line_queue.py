"""LineQueue: writes the log lines of a fast loop several at a time."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

GAP_S, HOLD_S = 0.01, 0.05


class LineQueue(logging.Filter):
    """Delays writes that come less than GAP_S seconds after the previous one, and makes them in order.

    A loop of 0.1 ms per iteration makes hundreds of lines per second. Written one by one they cost more than the
    iterations between them, mostly because the model's work has replaced the logger's data in the processor's caches.
    Delayed lines are written together with the first line that comes HOLD_S seconds after the last write, or after a
    gap, and at the latest at the end of an epoch or of the run. Lines further apart than GAP_S are not delayed, so a
    loop that hangs has shown all.

    It is also a filter of the logger: it writes the pending lines before any other record, which keeps the order. Records of
    other threads and of forked processes, such as a dataloader's workers, leave them to the thread that trains.
    """

    def __init__(self) -> None:
        super().__init__()
        self._logger: logging.Logger | None = None
        self._owner = _here()
        self._waiting: list[Callable[[], None]] = []
        self._written = self._put = 0.0

    def open(self, logger: logging.Logger) -> None:
        """Start to watch ``logger``; before this no line is delayed."""
        self.close()
        self._logger, self._owner = logger, _here()
        logger.addFilter(self)

    def close(self) -> None:
        """Write the pending lines and stop watching; may be called again."""
        try:
            self.flush()
        finally:
            if self._logger is not None:
                self._logger.removeFilter(self)
                self._logger = None

    def put(self, write: Callable[[], None]) -> None:
        """Call ``write`` now, or together with later ones."""
        self._waiting.append(write)
        before, self._put = self._put, time.monotonic()
        if self._logger is None or self._put - before > GAP_S or self._put - self._written > HOLD_S:
            self.flush()

    def flush(self) -> None:
        """Write the pending lines."""
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            for write in waiting:
                write()
            self._written = time.monotonic()

    def filter(self, record: logging.LogRecord) -> bool:
        """Let every record pass, after the pending lines have been written; an error in them does not stop it."""
        if not self._waiting or _here() != self._owner:
            return True
        try:
            self.flush()
        except RuntimeError as error:  # reading scalars from a device that has failed
            assert self._logger is not None, "it is this filter that was asked"
            self._logger.error(f"Pending log lines could not be written: {error}")
        return True


def _here() -> tuple[int, int]:
    """Return the current process and thread."""
    return os.getpid(), threading.get_ident()
