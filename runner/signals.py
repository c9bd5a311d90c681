"""Handlers of the signals that ask a run to end; there is one table of them per process, and one run that hears."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch

WORKER_S = 30
"""Seconds that a worker of a dataloader goes on after the signal; whoever sent it kills what is left by then."""


class Listener(Protocol):
    """What hears of a signal."""

    @property
    def is_needed(self) -> bool:
        """False if there is nothing left to end."""

    def came(self, number: int) -> None:
        """Hear of a signal, in the main thread between two bytecodes; may raise."""


_pid = os.getpid()
_is_over = False
_latest: weakref.ref[Any] | None = None
_end: weakref.ref[BaseException] | None = None
_in_progress: list[Listener] = []


def listen(listener: Listener, names: Sequence[str]) -> list[str]:
    """Let ``listener`` hear signals, unless a run in progress hears them; return the names of those it does not get.

    A signal for which the program, or a library such as faulthandler, has a handler stays as it is. So do all signals if
    this is not the main thread.

    Args:
        names: such as "TERM".
    """
    global _latest, _pid
    _latest, _pid = weakref.ref(listener), os.getpid()
    return [name for name in names if not _set(signal.Signals[f"SIG{name}"])]


def left_alone(names: Sequence[str]) -> str:
    """Say in a line that these signals, which ``listen`` has not got, do not end a run; "" if there are none."""
    if not names:
        return ""
    said = f"env_cfg.preemption.signals: {', '.join(names)} left alone"
    if threading.current_thread() is not threading.main_thread():
        return f"{said}, the runner was not made in the main thread; request_stop() ends a run"
    return f"{said}, the program or a library has a handler of its own"


def heard(names: Sequence[str]) -> int | None:
    """A signal of these names that ``listen`` has a handler for, with which a thread can call the listener; else None."""
    numbers = (signal.Signals[f"SIG{name}"] for name in names)
    return next((number for number in numbers if signal.getsignal(number) is _handle), None)


class Outliving:
    """Lets a worker of a dataloader go on for WORKER_S seconds after the signals that end a run.

    The process group may have got the signal, and the last update needs the worker's batches. When the training process
    exits, workers end at once, because multiprocessing waits for them then.
    """

    def __init__(self) -> None:
        self._numbers = [number for number in signal.valid_signals() if signal.getsignal(number) is _handle]
        self.is_over = torch.zeros((), dtype=torch.bool, device="cpu").share_memory_()  # type: ignore[no-untyped-call]
        _outliving.add(self)

    def begin(self) -> None:
        """Set the handlers, in the worker; also over that of torch, which ends the worker."""
        for number in self._numbers:
            if signal.getsignal(number) in (signal.SIG_DFL, _handle):
                signal.signal(number, self._came)

    def _came(self, number: int, frame: FrameType | None) -> None:
        if self.is_over:
            os._exit(0)
        signal.alarm(WORKER_S)


_outliving: weakref.WeakSet[Outliving] = weakref.WeakSet()


@atexit.register  # after multiprocessing's, so it is called before
def _end_workers() -> None:
    for outliving in list(_outliving):
        outliving.is_over.fill_(True)


def begin(listener: Listener) -> None:
    """Let ``listener`` hear signals until ``end``, if it is the first: a run within another's hook ends with that one."""
    _in_progress.append(listener)


def end(listener: Listener) -> None:
    """Undo ``begin``."""
    _in_progress.remove(listener)


def end_all() -> None:
    """Leave signals to the system, because the interpreter exits: no run is left that could end."""
    global _is_over
    _is_over = True


def outlast(end: BaseException) -> None:
    """Let no further signal disturb the end that ``end`` makes, unless the program catches it.

    Launchers send one as soon as the first process has left, while others close their files or are in atexit functions.
    """
    global _end
    _end = weakref.ref(end, _is_gone)


def _is_gone(end: weakref.ref[BaseException]) -> None:
    if sys._getframe().f_back is not None or threading.current_thread() is not threading.main_thread():
        return  # the program has caught it
    for number in signal.valid_signals():
        if signal.getsignal(number) is _handle:  # the interpreter gives back all others at its end
            signal.signal(number, signal.SIG_IGN)


def hearing() -> Listener | None:
    """The listener of the run in progress, or of the one that was made last and still exists."""
    if _in_progress:
        return _in_progress[0]
    listener: Listener | None = None if _latest is None else _latest()
    return listener if listener is not None and listener.is_needed else None


def _set(number: signal.Signals) -> bool:
    known = signal.getsignal(number)
    if known is _handle:
        return True
    if threading.current_thread() is not threading.main_thread() or known is not signal.SIG_DFL or is_caught(number):
        return False
    signal.signal(number, _handle)
    return True


def is_caught(number: int, pid: int | None = None) -> bool:
    """Whether a process (None: this one) has a handler, also one of C code, of which Python does not know.

    The kernel tells on Linux; False elsewhere.

    Raises:
        OSError: there is no such process.
    """
    if sys.platform != "linux":
        return False
    lines = Path(f"/proc/{pid or 'self'}/status").read_text().splitlines()
    caught = next(line.split()[1] for line in lines if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (number - 1) & 1)


def _handle(number: int, frame: FrameType | None) -> None:
    is_forked = os.getpid() != _pid
    if not is_forked and not _is_over and (listener := hearing()) is not None:
        listener.came(number)
    elif is_forked or _end is None or _end() is None:
        _as_ever(number, frame)


def _as_ever(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
