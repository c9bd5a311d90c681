"""LineQueue: log lines of a fast loop are written several at a time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

HOLD_S = 0.05


class LineQueue(logging.Filter):
    """Holds writes back for up to HOLD_S seconds after the last one, and carries them out in order.

    A loop of 0.1 ms per iteration has hundreds of lines per second. Written one by one they cost more than the iterations
    between them, mostly because each finds the processor's caches filled with the model's work. Where lines are further
    apart than HOLD_S nothing is held back.

    As a filter of a logger it writes what waits before any other record of that logger, so the order stays.
    """

    def __init__(self) -> None:
        super().__init__()
        self._logger: logging.Logger | None = None
        self._waiting: list[Callable[[], None]] = []
        self._written = 0.0

    def open(self, logger: logging.Logger) -> None:
        """Watch ``logger``; before this nothing is held back."""
        self.close()
        self._logger = logger
        logger.addFilter(self)

    def close(self) -> None:
        """Write what waits, and watch no more; may be called again."""
        self.flush()
        if self._logger is not None:
            self._logger.removeFilter(self)
            self._logger = None

    def put(self, write: Callable[[], None]) -> None:
        """Call ``write``, now or with later ones."""
        self._waiting.append(write)
        if self._logger is None or time.monotonic() - self._written > HOLD_S:
            self.flush()

    def flush(self) -> None:
        """Write what waits."""
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            for write in waiting:
                write()
            self._written = time.monotonic()

    def filter(self, record: logging.LogRecord) -> bool:
        """Let every record pass, after what waits."""
        self.flush()
        return True
