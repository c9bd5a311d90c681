"""LineQueue: log lines of a fast loop are written several at a time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

GAP_S, HOLD_S = 0.01, 0.05


class LineQueue(logging.Filter):
    """Holds back writes that come less than GAP_S seconds after the one before, and carries them out in order.

    A loop of 0.1 ms per iteration has hundreds of lines per second. Written one by one they cost more than the iterations
    between them, mostly because each finds the processor's caches filled with the model's work. They are written with the
    first line that comes HOLD_S after the last write, or after a gap, and at the latest when an epoch or the run ends.
    Where lines are further apart than GAP_S nothing is held back, so a loop that comes to a halt has shown all of them.

    As a filter of a logger it writes what waits before any other record of that logger, so the order stays.
    """

    def __init__(self) -> None:
        super().__init__()
        self._logger: logging.Logger | None = None
        self._waiting: list[Callable[[], None]] = []
        self._written = self._put = 0.0

    def open(self, logger: logging.Logger) -> None:
        """Watch ``logger``; before this nothing is held back."""
        self.close()
        self._logger = logger
        logger.addFilter(self)

    def close(self) -> None:
        """Write what waits, and watch no more; may be called again."""
        try:
            self.flush()
        finally:
            if self._logger is not None:
                self._logger.removeFilter(self)
                self._logger = None

    def put(self, write: Callable[[], None]) -> None:
        """Call ``write``, now or with later ones."""
        self._waiting.append(write)
        before, self._put = self._put, time.monotonic()
        if self._logger is None or self._put - before > GAP_S or self._put - self._written > HOLD_S:
            self.flush()

    def flush(self) -> None:
        """Write what waits."""
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            for write in waiting:
                write()
            self._written = time.monotonic()

    def filter(self, record: logging.LogRecord) -> bool:
        """Let every record pass, after what waits, be it the record of what keeps that from being written."""
        try:
            self.flush()
        except RuntimeError as error:  # figures on a device that has failed
            assert self._logger is not None, "it is this filter that was asked"
            self._logger.error(f"Log lines that were due could not be written: {error}")
        return True
