"""What the interpreter shows of flextrain's own errors that nobody catches: one line, of one process of a machine.

Errors of other kinds are shown as ever, and so are those that a bug of the user's has caused. ``FLEXTRAIN_TRACEBACK=1``
shows all tracebacks. Notebooks and debuggers do not come here, and a program's own ``sys.excepthook`` keeps what it shows.
"""

from __future__ import annotations

import datetime
import hashlib
import logging
import os
import platform
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from .log_marks import ONLY_IN_FILE, TRACEBACK_IN_FILE

_VARIABLE = "FLEXTRAIN_TRACEBACK"
_LIBRARY = __name__.partition(".")[0]
_NOT_THE_USER_S = frozenset((_LIBRARY, "torch", "torchmetrics", "numpy", "deepspeed", "rich"))
_STANDARD = sysconfig.get_path("stdlib")
_TOLD = "_flextrain_told"
"""Attribute of errors that the log has told of: what it has said."""
_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]
_PATIENCE_S = 3.0
_own: Any = None
_kinds: list[type[BaseException]] = []


def show_in_one_line(kind: type[BaseException] | None = None) -> None:
    """Let the interpreter show uncaught errors of a kind in one line, from now on; None: only those that ``tell`` gets."""
    global _own
    if kind is not None and kind not in _kinds:
        _kinds.append(kind)
    if sys.excepthook is not _own or _own is None:
        before = sys.excepthook  # torch sets its own when it makes a process group

        def excepthook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
            _show(before, kind, value, trace)

        sys.excepthook = _own = excepthook


def tell(error: BaseException, said: str) -> None:
    """Say that the log has told of an error, with the traceback: the interpreter does not show it again.

    Args:
        error: the error.
        said: what was said in a word, for whoever reads only stderr; empty: that needs nothing.
    """
    setattr(error, _TOLD, said)
    show_in_one_line()


def told(error: BaseException) -> str | None:
    """What the log has said of an error; None if it has said nothing."""
    said: str | None = getattr(error, _TOLD, None)
    return said


def is_first_to_say(text: str) -> bool:
    """Whether no other process of this machine has said this; without torchrun, which has a place for it, always true."""
    env = os.environ
    if env.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or int(env.get("WORLD_SIZE", "1")) == 1:
        return True
    own = f"{platform.node()} {env.get('TORCHELASTIC_RUN_ID')} {env.get('TORCHELASTIC_RESTART_COUNT')} {text}"
    key = f"flextrain/said/{hashlib.blake2b(own.encode(), digest_size=16).hexdigest()}"
    try:
        import torch.distributed as dist

        where = env["MASTER_ADDR"], int(env["MASTER_PORT"])
        patience = datetime.timedelta(seconds=_PATIENCE_S)
        store = dist.TCPStore(*where, is_master=False, wait_for_workers=False, timeout=patience)  # type: ignore[attr-defined]
        return bool(store.compare_set(key, "", env["RANK"]).decode() == env["RANK"])
    except (RuntimeError, OSError, ValueError, KeyError):  # the agent has gone
        return True


def say(error: BaseException, text: str) -> None:
    """Write what a process ends with to stderr, unless another one, or this one's log, has done so.

    Args:
        error: the error.
        text: the line.
    """
    said = told(error)
    if said is not None and (not said or _is_one_stream()):
        return
    if is_first_to_say(text):
        sys.stderr.write(f"{text}\n")


def wants_traceback() -> bool:
    """Whether the user has asked for tracebacks."""
    return os.environ.get(_VARIABLE, "") not in ("", "0")


def _show(before: _Hook, kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
    said = told(value)
    if said == "":
        return
    is_ours = any(isinstance(value, each) for each in _kinds) and _shows_tracebacks(before)
    if wants_traceback() or not (said or (is_ours and not has_bug_of_the_user(value) and not _is_interactive())):
        before(kind, value, trace)
        return
    if said:
        say(value, f"{_LIBRARY}: {said}")
        return
    text = f"{kind.__name__}: {' '.join(str(value).split())}"
    where = the_user_s_line(value)
    notes = [*([where] if where else []), f"{_log_with_traceback(text, value) or f'{_VARIABLE}=1 shows'} the traceback"]
    say(value, f"{_LIBRARY}: {text} ({'; '.join(notes)})")


def _log_with_traceback(text: str, error: BaseException) -> str:
    """Write the traceback to the log file; return ``x.log has``, or nothing if there is no log."""
    logger = logging.getLogger(_LIBRARY)
    files = [handler.baseFilename for handler in logger.handlers if isinstance(handler, logging.FileHandler)]
    if not files:
        return ""
    marks = {TRACEBACK_IN_FILE: True, ONLY_IN_FILE: True}
    trace = (type(error), error, error.__traceback__)
    logger.handle(logger.makeRecord(logger.name, logging.ERROR, __file__, 0, text, (), trace, extra=marks))
    return f"{files[-1]} has"


def _shows_tracebacks(hook: Any) -> bool:
    """Whether a hook shows tracebacks and does nothing else: Python's own, or torch's, which adds the rank to another's."""
    if hook is sys.__excepthook__ or hook is _own or getattr(hook, "__module__", "") == __name__:
        return True
    if getattr(hook, "__module__", "") != "torch.distributed.distributed_c10d":
        return False
    inside = [cell.cell_contents for cell in hook.__closure__ or ()]
    return all(_shows_tracebacks(each) for each in inside if callable(each))


def _is_interactive() -> bool:
    """Whether the program goes on after an error: at a prompt, or with ``python -i``."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


def _is_one_stream() -> bool:
    """Whether standard output, to which logs go, and standard error are one terminal, file or pipe."""
    try:
        out, err = (os.fstat(stream.fileno()) for stream in (sys.stdout, sys.stderr))
    except (OSError, ValueError, AttributeError):  # a program has put something else there
        return False
    return (out.st_dev, out.st_ino) == (err.st_dev, err.st_ino)


def has_bug_of_the_user(error: BaseException) -> bool:
    """Whether an error follows from one of another kind that came from the user's code, whose traceback is needed."""
    causes = [each for each in _before_it(error) if not isinstance(each, tuple(_kinds))]
    found = [_the_user_s(each.__traceback__) for each in causes]
    return any(frame is not None and "site-packages" not in frame[0].f_code.co_filename for frame in found)


def _before_it(error: BaseException) -> Iterator[BaseException]:
    seen = {id(error)}
    found = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)


def the_user_s_line(error: BaseException) -> str:
    """The innermost line of the user's code that an error has passed, ``train.py:31``; empty if there is none."""
    found = _the_user_s(error.__traceback__)
    return "" if found is None else shown(found[0].f_code.co_filename, found[1])


def _the_user_s(trace: TracebackType | None) -> tuple[FrameType, int] | None:
    frames = [(frame, line) for frame, line in traceback.walk_tb(trace) if is_the_user_s(frame)]
    return frames[-1] if frames else None


def is_the_user_s(frame: FrameType) -> bool:
    """Whether a frame is of the user's code, or of a package that is not known here."""
    file, module = frame.f_code.co_filename, str(frame.f_globals.get("__name__", ""))
    if module.partition(".")[0] in _NOT_THE_USER_S or file.startswith("<"):
        return False
    return not file.startswith(_STANDARD + os.sep) or "site-packages" in file


def shown(file: str, line: int) -> str:
    """Return ``train.py:31``, relative to the working directory if the file is in it."""
    path = Path(file)
    here = Path.cwd()
    return f"{path.relative_to(here) if path.is_relative_to(here) else path}:{line}"
