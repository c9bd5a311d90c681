"""Monitor: a thread beside training in which watchers look after the job."""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ...core.base.errors import ONLY_IN_FILE, TRACEBACK_IN_FILE, FlexTrainError
from ...core.base.events import heartbeats
from .. import signals

if TYPE_CHECKING:
    from ..run import Run

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
        self._thread = threading.Thread(target=self._run, name="flextrain-monitor", daemon=True)

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


# The last words of a process that a thread ends, because its main thread does not return: log lines, and the exit.


_LOGGING_S = 3.0
_SAVING_S = 30.0
_QUIET_S = 10.0
"""Seconds in which a save has to write a part of a checkpoint, else it is not waited for."""
_NAP_S = 0.05


def say(run: Run, text: str, stack: str, speaks: bool = True) -> None:
    """Log how a run ends, at most for three seconds: the main thread may hold a lock of the logging, and never return.

    Args:
        run: the run.
        text: the first line goes to the console of every process.
        stack: what goes to log files only.
        speaks: whether this process writes the other lines to the console too.
    """

    def write() -> None:
        marks = {TRACEBACK_IN_FILE: True}
        if speaks:
            run.logger.error(text)
            marks[ONLY_IN_FILE] = True
        whole = f"{text}\n{stack}".rstrip()
        record = run.logger.makeRecord(run.logger.name, logging.ERROR, __file__, 0, whole, (), None, extra=marks)
        run.logger.handle(record)

    try_for_a_while(write)


def leave(status: int) -> None:
    """End this process, whose main thread is in a call that cannot be interrupted; a save in the background may end first."""
    deadline, last, changed = time.monotonic() + _SAVING_S, heartbeats(), time.monotonic()
    while _is_saving() and time.monotonic() < min(deadline, changed + _QUIET_S):
        time.sleep(_NAP_S)
        if (count := heartbeats()) != last:
            last, changed = count, time.monotonic()
    try_for_a_while(_flush)
    try_for_a_while(_end_children)
    os._exit(status)


def try_for_a_while(function: Callable[[], object]) -> None:
    """Call what writes to the log, and do not wait longer than three seconds: it may need a lock that is never released."""
    thread = threading.Thread(target=function, name="flextrain-last-words", daemon=True)
    thread.start()
    thread.join(_LOGGING_S)


def _end_children() -> None:
    """End workers of dataloaders, as the end of the interpreter does: one that is stuck would stay for ever."""
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()


def _is_saving() -> bool:
    return any(thread.name == "flextrain-save" for thread in threading.enumerate())


def _flush() -> None:
    for handler in _logger.handlers:
        handler.flush()
    sys.stdout.flush()
    sys.stderr.flush()
