"""Handlers of the signals that ask a run to end; there is one table of them per process, and one run that hears."""

from __future__ import annotations

import os
import signal
import sys
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

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
_latest: weakref.ref[Any] | None = None
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


def heard(names: Sequence[str]) -> int | None:
    """A signal of these names that ``listen`` has a handler for, with which a thread can call the listener; else None."""
    numbers = (signal.Signals[f"SIG{name}"] for name in names)
    return next((number for number in numbers if signal.getsignal(number) is _handle), None)


def begin(listener: Listener) -> None:
    """Let ``listener`` hear signals until ``end``, if it is the first: a run within another's hook ends with that one."""
    _in_progress.append(listener)


def end(listener: Listener) -> None:
    """Undo ``begin``."""
    _in_progress.remove(listener)


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
    if threading.current_thread() is not threading.main_thread() or known is not signal.SIG_DFL or _is_caught(number):
        return False
    signal.signal(number, _handle)
    return True


def _is_caught(number: signal.Signals) -> bool:
    """Whether C code has set a handler, of which Python does not know; on Linux the kernel tells."""
    if sys.platform != "linux":
        return False
    lines = Path("/proc/self/status").read_text().splitlines()
    caught = next(line.split()[1] for line in lines if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (number - 1) & 1)


def _handle(number: int, frame: FrameType | None) -> None:
    if os.getpid() != _pid:  # a forked child
        if _is_dataloader_worker():
            # The process group got the signal, and the batches of the last update are needed.
            signal.alarm(WORKER_S)
            return
        _as_ever(number)
    elif (listener := hearing()) is None:  # no run is left
        _as_ever(number)
    else:
        listener.came(number)


def _as_ever(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _is_dataloader_worker() -> bool:
    from torch.utils.data import get_worker_info

    return get_worker_info() is not None
