"""The early end of a run: what the log says about it, and the end of hooks."""

from __future__ import annotations

import logging
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...core.base.errors import (
    ONLY_IN_FILE,
    TRACEBACK_IN_FILE,
    CheckpointError,
    FlexTrainError,
    has_bug_of_the_user,
    is_first_to_say,
    tell,
)
from ...core.base.events import append_event
from ..resume.choose_checkpoint import way_on
from ..signals import outlast
from .failures import Reason, reason_of
from .origin import find_origin

if TYPE_CHECKING:
    from ..run import Run
    from .watchdog import Watchdog


class Terminated(SystemExit):
    """Ends a run, and the program unless it is caught, with the status of ``env_cfg.preemption``.

    Attributes:
        what: what came, and to which process.
        saved: what became of the training so far.
    """

    def __init__(self, status: int = 128 + signal.SIGTERM, what: str = "Ended by SIGTERM", saved: str = "") -> None:
        super().__init__(status)
        self.what, self.saved = what, saved
        outlast(self)


def tell_how_it_ended(run: Run, error: BaseException, has_begun: bool, watchdog: Watchdog | None = None) -> None:
    """Log the end of a run and call every hook's on_exception; errors of hooks are logged, not raised.

    Args:
        run: the run.
        error: the error that ended it.
        has_begun: True if training had loaded its start, so that epoch and iteration mean something.
        watchdog: tells the other processes, and knows which of them has failed; None for one process.
    """
    reason = reason_of(run, error) if isinstance(error, Exception) else None
    ending = None if watchdog is None else _share(run, error, reason, watchdog)
    try:
        run.finish_saving()
    except CheckpointError as second:
        run.logger.error(str(second))
    except KeyboardInterrupt:  # Ctrl-C again, by somebody who does not want to wait
        run.logger.warning("Interrupted again: the checkpoint that was being written may stay incomplete")
    _log_how_it_ended(run, error, reason, ending, has_begun)
    for method in run.hook_calls["on_exception"]:
        try:
            method(run, exception=error)
        except Exception as second:  # logged, because it must not hide the first error
            kind = type(getattr(method, "__self__", method))  # a function may be set as an attribute of a hook
            run.logger.error(f"{kind.__name__}.on_exception: {second}", exc_info=second)


def tell_others(run: Run, error: BaseException, watchdog: Watchdog) -> None:
    """Tell the other processes of an error before training, such as one in building the model, or log which had one."""
    reason = reason_of(run, error) if isinstance(error, Exception) else None
    if ending := _share(run, error, reason, watchdog):
        _log_how_it_ended(run, error, reason, ending, has_begun=False)


def _share(run: Run, error: BaseException, reason: Reason | None, watchdog: Watchdog) -> _Cause | None:
    """Tell the other processes why this one ends; return how another one did if this error only follows from that."""
    if reason is None:
        if watchdog.tell(run, "left", _told_as(error)) and not isinstance(error, Terminated):
            append_event(run.work_dir, "left", rank=run.rank, iter=run.iter, reason=_told_as(error))
        return None
    if (ending := watchdog.reason(error)) is not None:
        because = ending.words(with_machine=watchdog.is_elsewhere(ending))
        if hasattr(error, "add_note"):  # Python 3.11; the interpreter prints it below the traceback
            error.add_note(f"flextrain: failed because {because}")
        return _Cause(because, ending.said if ending.kind == "failed" else because)
    watchdog.tell(run, "failed", reason.in_a_line)
    return None


def _told_as(error: BaseException) -> str:
    """What another process says that this one did: ``was interrupted``."""
    said = _what(error)[1]
    return f"{'' if said.startswith('Ended') else 'was '}{said[0].lower()}{said[1:]}"


def _what(error: BaseException) -> tuple[int, str]:
    """The level of the line that says how a run ended without an error, and what it says."""
    if isinstance(error, Terminated):
        return logging.WARNING, error.what
    if isinstance(error, KeyboardInterrupt):
        return logging.INFO, "Interrupted"
    if isinstance(error, SystemExit):
        return logging.INFO, f"Ended by sys.exit({'' if error.code is None else repr(error.code)})"
    return logging.INFO, f"Ended by {type(error).__name__}"


@dataclass(frozen=True)
class _Cause:
    """What happened to another process.

    Attributes:
        words: to follow "Failed because".
        said: what every process of this machine says of it alike.
    """

    words: str
    said: str


def _log_how_it_ended(
    run: Run, error: BaseException, found: Reason | None, cause: _Cause | None, has_begun: bool
) -> None:
    """Log what ended the run and what to resume from; the traceback goes only to the log file, of each process to its own.

    On the console the interpreter prints the traceback of an error in the user's code, or the program has caught it. For
    errors of flextrain's own, those that follow from the end of another process, and Ctrl-C, the line is enough; of several
    processes that would say the same, one says it.
    """
    (level, what), where, reason = _what(error), "", ""
    if isinstance(error, Terminated) and error.saved:
        reason = f"; {error.saved}"
    said = ""
    if isinstance(error, KeyboardInterrupt):
        tell(error, "")
    if cause is not None and found is not None:
        level, what, said = logging.ERROR, f"Failed because {cause.words}; noticed", cause.said
        tell(error, cause.words)
        where = found.where or find_origin(error, None).words()  # errors of flextrain's own say where, except these
    elif found is not None:
        level, what, where, said = logging.ERROR, "Failed", found.where, found.in_a_line
        if isinstance(error, FlexTrainError) and not has_bug_of_the_user(error):
            tell(error, said)
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
            reason += f"; {way_on(run)}"
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
        extra={TRACEBACK_IN_FILE: True, ONLY_IN_FILE: bool(said) and not is_first_to_say(f"{run.log_dir} {said}")},
    )
    # Ranks other than 0 drop what is no error; their own log files take this line whatever its level.
    if run.rank != 0 or logger.isEnabledFor(level):
        logger.handle(record)
