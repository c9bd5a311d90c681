"""The early end of a run: handling of SIGTERM, and what the log says about the end."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from ..core.checkpoint import find_latest
from ..core.errors import CheckpointError
from ..core.events import append_event
from ..core.log_marks import TRACEBACK_IN_FILE
from .failures.report import reason_of

if TYPE_CHECKING:
    from .run import Run


class Terminated(SystemExit):
    """Raised on SIGTERM; a program that does not catch it exits with the conventional status 143."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


class Termination:
    """The handler of SIGTERM during a run: the first signal ends the run, later ones do not disturb its end."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._came = self._ends = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Raise Terminated in the main thread."""
        if os.getpid() != self._pid:  # a forked child has nothing to finish
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self._came = True
        # torchrun forwards a signal that the scheduler may have sent to every process already.
        if not self._ends:
            raise Terminated

    def end(self, error: BaseException) -> BaseException:
        """Return what ended the run: ``error`` may only follow from the signal, which dataloader workers got too."""
        self._ends = True
        return Terminated() if self._came and isinstance(error, Exception) else error


@contextmanager
def terminable() -> Iterator[Termination]:
    """Make SIGTERM raise Terminated, if this is the main thread and the program has no handler of its own."""
    termination = Termination()
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield termination
        return
    signal.signal(signal.SIGTERM, termination.handle)
    try:
        yield termination
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def tell_how_it_ended(run: Run, error: BaseException, has_begun: bool) -> None:
    """Log the end of a run and call every hook's on_exception; errors of hooks are logged, not raised.

    Args:
        run: the run.
        error: the error that ended it.
        has_begun: True if training had loaded its start, so that epoch and iteration mean something.
    """
    try:
        run.finish_saving()
    except CheckpointError as second:
        run.logger.error(str(second))
    except KeyboardInterrupt:  # Ctrl-C again, by somebody who does not want to wait
        run.logger.warning("Interrupted again: the checkpoint that was being written may stay incomplete")
    _log_how_it_ended(run, error, has_begun)
    for method in run.hook_calls["on_exception"]:
        try:
            method(run, exception=error)
        except Exception as second:  # logged, because it must not hide the first error
            kind = type(getattr(method, "__self__", method))  # a function may be set as an attribute of a hook
            run.logger.error(f"{kind.__name__}.on_exception: {second}", exc_info=second)


def _log_how_it_ended(run: Run, error: BaseException, has_begun: bool) -> None:
    """Log what ended the run and what to resume from; the traceback goes only to the log file, of each process to its own.

    On the console the interpreter prints that of a failure, or the program has caught the exception. After Ctrl-C the
    line stands last there.
    """
    level, what, reason = logging.INFO, f"Ended by {type(error).__name__}", ""
    if isinstance(error, Terminated):
        level, what = logging.WARNING, "Terminated (SIGTERM)"
    elif isinstance(error, KeyboardInterrupt):
        what = "Interrupted"
        _print_no_traceback(error)
    elif isinstance(error, SystemExit):
        what = f"Ended by sys.exit({'' if error.code is None else repr(error.code)})"
    where = ""
    if isinstance(error, Exception):
        found = reason_of(run, error)
        level, what, where = logging.ERROR, "Failed", found.where
        facts: dict[str, Any] = {"rank": run.rank, "iter": run.iter} if has_begun else {"rank": run.rank}
        if found.samples:
            facts["samples"] = list(found.samples)
        append_event(run.work_dir, "failed", **facts, reason=found.said, where=where.strip(), follows=found.follows)
        reason = f": {found.said}{f'; {found.advice}' if found.advice else ''}"
        if found.advice and hasattr(error, "add_note"):  # Python 3.11; the interpreter prints it below the traceback
            error.add_note(f"flextrain: failed{where or ' here'}; {found.advice}")
    if run.world_size > 1 and run.rank == 0:  # lines of other ranks begin with their number
        what += " on rank 0"
    if has_begun:
        what += f" after epoch {run.epoch}, iteration {run.iter}"
        if run.rank == 0:
            reason += f"; {_advice(run)}"
    logger = run.logger
    told = isinstance(error, (Exception, KeyboardInterrupt))
    record = logger.makeRecord(
        logger.name,
        level,
        __file__,
        0,
        what + where + reason,
        (),
        (type(error), error, error.__traceback__) if told else None,
        extra={TRACEBACK_IN_FILE: True},
    )
    # Ranks other than 0 drop what is no error; their own log files take this line whatever its level.
    if run.rank != 0 or logger.isEnabledFor(level):
        logger.handle(record)


_TOLD = "_flextrain_told"
"""Attribute of interruptions that the log has told of."""


def _print_no_traceback(error: KeyboardInterrupt) -> None:
    """Make the interpreter end without a traceback if this interruption ends the program; the status stays 130."""
    setattr(error, _TOLD, True)
    before = sys.excepthook
    if getattr(before, _TOLD, False):
        return

    def excepthook(kind: type[BaseException], value: BaseException, traceback: TracebackType | None) -> None:
        if not getattr(value, _TOLD, False):
            before(kind, value, traceback)

    setattr(excepthook, _TOLD, True)
    sys.excepthook = excepthook


def _advice(run: Run) -> str:
    try:
        newest = find_latest(run.checkpoint_dir)
    except CheckpointError as error:
        return str(error)
    return f"resume=True continues from {newest.name}" if newest else "no checkpoint was saved yet"
