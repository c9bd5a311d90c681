"""Monitor: a thread beside training in which watchers look after the job."""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence

from ..core.errors import FlexTrainError
from . import signals

_logger = logging.getLogger("flextrain")

_EXIT_S = 1.0
"""Seconds that the interpreter waits at its exit for the current rounds."""


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
        self._wakes = threading.Event()
        self._ends = False
        self._round = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="flextrain-monitor", daemon=True)

    @property
    def silent_s(self) -> float:
        """Seconds since the current round began; long if a watcher waits for a store that does not answer."""
        return time.monotonic() - self._round

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()
        _started.add(self)

    def stop(self) -> None:
        """Make this the last round; do not wait for it, because the store may not answer any more."""
        self._ends = True
        self._wakes.set()

    def wake(self) -> None:
        """Begin the next round at once."""
        self._wakes.set()

    def join(self, timeout_s: float) -> None:
        """Wait until the last round is over, at most ``timeout_s`` seconds."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            self._wakes.wait(self._period_s)
            self._wakes.clear()
            if self._ends:
                return
            self._round = time.monotonic()
            for watcher in list(self._watchers):
                try:
                    watcher()
                except Exception as error:
                    self._watchers.remove(watcher)
                    if not self._ends:
                        name = getattr(watcher, "__qualname__", type(watcher).__name__)
                        trace = None if isinstance(error, FlexTrainError) else error  # these say all
                        _logger.warning(f"{name} ended by {type(error).__name__}: {error}", exc_info=trace)


def weakly(method: Callable[[], None]) -> Callable[[], None]:
    """Return a watcher that calls a bound method as long as its object is used elsewhere."""
    reference = weakref.WeakMethod(method)

    def watcher() -> None:
        if (alive := reference()) is not None:
            alive()

    watcher.__qualname__ = method.__qualname__
    return watcher


_started: weakref.WeakSet[Monitor] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """Stop all threads before the interpreter ends: one that it finds in a call of torch's store would abort the process."""
    signals.end_all()  # one that came now would raise in here
    deadline = time.monotonic() + _EXIT_S
    monitors = list(_started)
    for monitor in monitors:
        monitor.stop()
    for monitor in monitors:
        monitor.join(max(0.0, deadline - time.monotonic()))
