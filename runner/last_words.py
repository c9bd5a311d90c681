"""The last words of a process that a thread ends, because its main thread does not return: log lines, and the exit."""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..core.heartbeat import heartbeats
from ..core.log_marks import ONLY_IN_FILE, TRACEBACK_IN_FILE

if TYPE_CHECKING:
    from .run import Run

_LOGGING_S = 3.0
_SAVING_S = 30.0
_QUIET_S = 10.0
"""Seconds in which a save has to write a part of a checkpoint, else it is not waited for."""
_NAP_S = 0.05

_logger = logging.getLogger("flextrain")


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
