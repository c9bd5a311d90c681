"""Stacks of the workers of data loaders: a worker that is stuck can still be asked where."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import sys
import sysconfig
import time
from pathlib import Path

from ..signals import is_caught

_FILE = "flextrain-stack"
_BEGINS = "Stack (most recent call first):"
_OUTERMOST = " in _worker_loop\n"
_LINE = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
_STANDARD = sysconfig.get_path("stdlib") + os.sep
_ROOT = Path(__file__).parents[2]
_OWN = (f"{_ROOT / 'runner'}{os.sep}", f"{_ROOT / 'core'}{os.sep}")
_NAP_S = 0.02


def answer() -> None:
    """Let this worker write its stack, also from C code, when ``ask`` sends it a signal; nothing where that cannot be.

    The file is in memory and ends with the worker; ``ask`` finds it among the worker's open files.
    """
    if sys.platform != "linux" or (number := _signal()) is None:
        return
    if signal.getsignal(number) is signal.SIG_DFL and not is_caught(number):
        faulthandler.register(number, file=os.memfd_create(_FILE), all_threads=False)


def ask(pid: int, patience_s: float = 1.0) -> str:
    """Return the stack of a worker of this process, innermost line first; empty if it does not answer in time."""
    file, number = _file_of(pid), _signal()
    if file is None or number is None:
        return ""
    deadline, before = time.monotonic() + patience_s, ""
    try:
        if not is_caught(number, pid):  # the signal would end it
            return ""
        os.kill(pid, number)
        while time.monotonic() < deadline:
            time.sleep(_NAP_S)
            if (text := file.read_text(errors="replace")) and text == before:  # it is written line by line
                break
            before = text
    except OSError:  # it has ended
        return ""
    inside, found, _ = before.rpartition(_BEGINS)[2].partition(_OUTERMOST)
    # What is outside of it in a forked worker is the stack of the process that forked it.
    return f"{inside}{found}".strip("\n") if found else ""


def source_in(stack: str) -> tuple[str, int, str] | None:
    """File, line and function of the innermost code of the user's in a stack that ``ask`` returned; None if there is none."""
    lines = [(file, int(line), function) for file, line, function in _LINE.findall(stack)]
    others = [found for found in lines if not found[0].startswith((*_OWN, "<")) and "/torch/" not in found[0]]
    own = [found for found in others if not found[0].startswith(_STANDARD) and "/site-packages/" not in found[0]]
    packages = [found for found in others if "/site-packages/" in found[0]]
    return next(iter(own or packages), None)


def _signal() -> int | None:
    """A signal that neither Python nor torch uses."""
    return None if sys.platform != "linux" else signal.SIGRTMAX - 7


def _file_of(pid: int) -> Path | None:
    with contextlib.suppress(OSError):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if str(file.readlink()).startswith(f"/memfd:{_FILE}"):
                    return file
    return None
