"""How a run ends before its time: what SIGTERM does meanwhile, and what the log says."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from ..core.checkpoint import find_latest
from ..core.errors import CheckpointError
from .reporting.console import IN_FILE

if TYPE_CHECKING:
    from .run import Run


class Terminated(SystemExit):
    """SIGTERM came; a program that does not catch it ends with the conventional status 143."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


class Termination:
    """What SIGTERM does during a run: the first one ends it, later ones are kept from what is still to be done."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._came = self._ends = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Raise Terminated, wherever the main thread is."""
        if os.getpid() != self._pid:  # a forked child, which has nothing to finish
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self._came = True
        # torchrun passes on the signal that a scheduler has sent to every process already.
        if not self._ends:
            raise Terminated

    def end(self, error: BaseException) -> BaseException:
        """What ended the run; ``error`` may be but a consequence of the signal, which data-loading workers got too."""
        self._ends = True
        return Terminated() if self._came and isinstance(error, Exception) else error


@contextmanager
def terminable() -> Iterator[Termination]:
    """Let SIGTERM raise Terminated, in the main thread and where the program has no handler of its own."""
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


def tell_how_it_ended(run: Run, error: BaseException, has_place: bool) -> None:
    """Tell the log and every hook, also when another one fails at it; the first error is the one that is raised.

    Args:
        run: the run.
        error: what ended it.
        has_place: whether training had what it begins with, so that it stands somewhere.
    """
    try:
        run.finish_saving()
    except CheckpointError as second:
        run.logger.error(str(second))
    _log_how_it_ended(run, error, has_place)
    for method in run.hook_calls["on_exception"]:
        try:
            method(run, exception=error)
        except Exception as second:  # reported, and must not hide the error that it follows
            run.logger.error(f"{type(method.__self__).__name__}.on_exception: {second}", exc_info=second)


def _log_how_it_ended(run: Run, error: BaseException, has_place: bool) -> None:
    """Log what ended the run and what to resume from; of a failure the traceback too, but not on the console.

    The interpreter prints that there, or the program has caught the exception.
    """
    level, what, reason = logging.INFO, f"Ended by {type(error).__name__}", ""
    if isinstance(error, Terminated):
        level, what = logging.WARNING, "Terminated (SIGTERM)"
    elif isinstance(error, KeyboardInterrupt):
        what = "Interrupted"
    elif isinstance(error, Exception):
        first_line = str(error).strip().partition("\n")[0]
        level, what, reason = logging.ERROR, "Failed", f": {type(error).__name__}: {first_line}"
    if has_place:
        what += f" after epoch {run.epoch}, iteration {run.iter}"
        if run.rank == 0:
            reason += f"; {_advice(run)}"
    failed = level == logging.ERROR
    run.logger.log(level, what + reason, exc_info=error if failed else None, extra={IN_FILE: failed})


def _advice(run: Run) -> str:
    try:
        newest = find_latest(run.checkpoint_dir)
    except CheckpointError as error:
        return str(error)
    return f"resume=True continues from {newest.name}" if newest else "no checkpoint was saved yet"
