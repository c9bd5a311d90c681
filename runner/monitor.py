"""Monitor: a thread beside training in which watchers look after the job."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

_logger = logging.getLogger("flextrain")


class Monitor:
    """Calls watchers one after another, several times a second, in a thread that dies with the process.

    The watchers share the thread, and so may share one Bulletin. A watcher that raises is not called again, and the
    error is logged: an observer must not end a run by a defect of its own.

    Args:
        watchers: functions without arguments; each should return within milliseconds.
        period_s: seconds between two rounds.
    """

    def __init__(self, watchers: Sequence[Callable[[], None]], period_s: float = 0.2) -> None:
        self._watchers = list(watchers)
        self._period_s = period_s
        self._ends = threading.Event()
        self._round = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="flextrain-monitor", daemon=True)

    @property
    def silent_s(self) -> float:
        """Seconds since the current round began; long if a watcher waits for a store that does not answer."""
        return time.monotonic() - self._round

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Make this the last round; do not wait for it, because the store may not answer any more."""
        self._ends.set()

    def _run(self) -> None:
        while not self._ends.wait(self._period_s):
            self._round = time.monotonic()
            for watcher in list(self._watchers):
                try:
                    watcher()
                except Exception as error:
                    self._watchers.remove(watcher)
                    if not self._ends.is_set():
                        name = getattr(watcher, "__qualname__", type(watcher).__name__)
                        _logger.warning(f"{name} ended by {type(error).__name__}: {error}", exc_info=error)
