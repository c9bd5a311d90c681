"""Exceptions of flextrain. Every message is one line: where, what was given, what is allowed, the nearest name."""

from __future__ import annotations

import datetime
import difflib
import hashlib
import logging
import os
import platform
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self

# Marks of log records that the console and the log file treat differently; give them as ``extra={MARK: True}``.


ONLY_IN_FILE = "only_in_file"
"""The record is long and for reference: the console leaves it out."""
TRACEBACK_IN_FILE = "traceback_in_file"
"""The record says how a process ended: every process writes it to its log file, and the console leaves out the traceback."""
ON_TERMINAL = "on_terminal"
"""What a console shows in place of the record's text if it is a terminal; it has ``drawn()``, which returns it for rich."""


unchecked = logging.getLogger("flextrain.unchecked")
"""Says which comparison of values was left out, because tensors have none."""


# What the interpreter shows of flextrain's own errors that nobody catches: one line, of one process of a machine.
#
# Errors of other kinds are shown as ever, and so are those that a bug of the user's has caused.
# ``FLEXTRAIN_TRACEBACK=1`` shows all tracebacks. Notebooks and debuggers do not come here, and a program's own
# ``sys.excepthook`` keeps what it shows.


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
        import socket

        import torch.distributed as dist

        where = env["MASTER_ADDR"], int(env["MASTER_PORT"])
        # A store that has ended refuses at once, where TCPStore tries again and again.
        socket.create_connection(where, _PATIENCE_S).close()
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
    # In one line, but for the items of a list.
    text = f"{kind.__name__}: " + "\n- ".join(map(one_line, str(value).split("\n- ")))
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


_KEY = re.compile(r"([A-Za-z_]\w*(?:\.\w+|\[\d+\])*): ")


class FlexTrainError(Exception):
    """Base class of all exceptions that flextrain defines; the interpreter shows one that nobody catches in one line."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Return a new error."""
        show_in_one_line(FlexTrainError)
        return super().__new__(cls, *args, **kwargs)


class ConfigError(FlexTrainError, ValueError):
    """An invalid configuration; raised before any process group or model exists.

    The message begins with the key and a colon: ``custom_hooks[0].interval: ...``.
    """

    origin: str | None = None
    """Where the value was written, if the message says it: ``configs/base.py:12``."""

    @property
    def path(self) -> tuple[str | int, ...]:
        """The key as names and indices, ("custom_hooks", 0, "interval"); empty if the message begins with none."""
        found = _KEY.match(str(self))
        if found is None:
            return ()
        names = re.findall(r"[^.\[\]]+", found[1])
        return tuple(int(name) if name.isdecimal() else name for name in names)

    def say_where(self, origin: str) -> None:
        """Put ``origin`` in front of the message."""
        self.args = (f"{origin}: {self}",)
        self.origin = origin


class NonFiniteError(FlexTrainError, ArithmeticError):
    """A loss or a gradient norm is NaN or infinite, and ``env_cfg=dict(nonfinite="raise")`` is set."""


class LossSpikeError(FlexTrainError, ArithmeticError):
    """The loss has spiked more often than ``LossSpikeHook`` may go back; every process raises it."""


class DivergenceError(FlexTrainError, RuntimeError):
    """Processes that should hold replicas of a tensor hold different values; every process raises it."""


class CorruptionError(FlexTrainError, RuntimeError):
    """Forward and backward gave other bits when they were run again, see ReplayHook; every process raises it."""


class DataError(FlexTrainError, ValueError):
    """A data file is damaged, or not what its source says; the message begins with the file and the sample."""


class LaunchError(FlexTrainError, RuntimeError):
    """The processes of a job could not connect to each other, or one of them failed."""


class StrategyError(FlexTrainError, RuntimeError):
    """A strategy does not support a request, or its methods were called in the wrong order."""


class CheckpointError(FlexTrainError, RuntimeError):
    """A checkpoint is missing, damaged, or does not fit the object that loads it."""


class TrialPruned(FlexTrainError):  # noqa: N818 - searches call it so
    """A search has no use for this run, which has ended in order; see PruningHook."""


class StorageError(CheckpointError):
    """Storage failed while a checkpoint was written. If a save raises it, it does so on every process."""


def nearest(name: str, candidates: Iterable[object], closeness: float = 0.6) -> str | None:
    """The candidate spelled most like ``name``; None if none reaches ``closeness``, from 0 (any) to 1 (equal)."""
    # Keys of a user's mapping may be anything.
    folded = {candidate.lower(): candidate for candidate in candidates if isinstance(candidate, str)}
    match = difflib.get_close_matches(name.lower(), folded, n=1, cutoff=closeness)
    return folded[match[0]] if match else None


def suggest(name: str, candidates: Iterable[object]) -> str:
    """The end ``, did you mean "x"?`` of an error about an unknown ``name``; empty if no candidate is close."""
    match = nearest(name, candidates)
    return f', did you mean "{match}"?' if match else ""


def one_line(value: object) -> str:
    """The text of an error or another value, in one line."""
    return " ".join(str(value).split())


def listed(names: Sequence[str], most: int) -> str:
    """Names with commas; of more than ``most``, the first ones."""
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """A number with its noun: ``1 epoch``, ``2 epochs``; ``plural`` if it is not the noun with an "s"."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


def one_of(candidates: Iterable[object]) -> str:
    """The allowed values as text: ``0, 1 or 2``."""
    words = [str(candidate) for candidate in candidates]
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " or " + words[-1]


# Why there is no strategy for Horovod, and what takes its place: for every message that says so.


WHY = "horovod 0.28.1, its last release, does not compile against torch 2.1 or later"
INSTEAD = (
    'strategy="ddp" averages gradients during backward as Horovod does, under the same mpirun or horovodrun --mpi, and under '
    "srun and torchrun; see examples/horovod_style.py"
)
