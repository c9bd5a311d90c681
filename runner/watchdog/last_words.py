"""The last words of a process that the watchdog ends: log lines, an event, and the exit."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from typing import TYPE_CHECKING

from ...core.heartbeat import heartbeats
from ...core.log_marks import ONLY_IN_FILE, TRACEBACK_IN_FILE

if TYPE_CHECKING:
    from ..run import Run

_LOGGING_S = 3.0
_SAVING_S = 30.0
_QUIET_S = 1.0


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
        for handler in run.logger.handlers:
            handler.flush()
        sys.stdout.flush()
        sys.stderr.flush()

    _within(write, _LOGGING_S)


def leave(status: int) -> None:
    """End this process, whose main thread is in a call that cannot be interrupted; a save that goes on may end first."""
    deadline, last = time.monotonic() + _SAVING_S, -1
    while (count := heartbeats()) != last and time.monotonic() < deadline:
        last = count
        if threading.active_count() > 1 and _is_saving():
            time.sleep(_QUIET_S)
    os._exit(status)


def _is_saving() -> bool:
    return any(thread.name.startswith("flextrain-save") for thread in threading.enumerate())


def _within(function: object, seconds: float) -> None:
    thread = threading.Thread(target=function, name="flextrain-last-words", daemon=True)  # type: ignore[arg-type]
    thread.start()
    thread.join(seconds)
