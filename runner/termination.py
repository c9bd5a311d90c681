"""The early end of a run: what the log says about it, and the end of hooks."""

from __future__ import annotations

import logging
import signal
import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ..core.checkpoint import find_latest, iteration_of
from ..core.errors import CheckpointError
from ..core.events import append_event
from ..core.log_marks import TRACEBACK_IN_FILE
from .failures.report import reason_of
from .resume.tier_notes import newest_fast

if TYPE_CHECKING:
    from .run import Run


class Terminated(SystemExit):
    """Ends a run, and the program unless it is caught, with the status of ``env_cfg.preemption``.

    Attributes:
        what: what came, and to which process.
        saved: what became of the training so far.
    """

    def __init__(self, status: int = 128 + signal.SIGTERM, what: str = "Ended by SIGTERM", saved: str = "") -> None:
        super().__init__(status)
        self.what, self.saved = what, saved


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
        level, what = logging.WARNING, error.what
        reason = f"; {error.saved}" if error.saved else ""
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
    # Lines of other ranks begin with their number; what ended all says itself where it came.
    if run.world_size > 1 and run.rank == 0 and not isinstance(error, Terminated):
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
        fast, iteration, _ = newest_fast(run)
        if fast is not None and (newest is None or iteration > iteration_of(newest)):
            return f"resume=True continues from {fast}"
    except CheckpointError as error:
        return str(error)
    return f"resume=True continues from {newest.name}" if newest else "no checkpoint was saved yet"
