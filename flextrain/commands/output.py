"""Where commands print."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable

from rich.console import Console

_UNBROKEN = 1000
# What a shell reports of a program that SIGPIPE ended: 128 and the signal's number.
_PIPE_CLOSED = 141


def print_json(value: object) -> None:
    """Print plain values as indented JSON."""
    json.dump(value, sys.stdout, indent=2)
    sys.stdout.write("\n")


def console() -> Console:
    """Standard output: lines are as long as the terminal, and elsewhere as their text, so that grep finds whole names.

    What is printed is shown as it is; colours come as rich's Text.
    """
    found = _Console(markup=False, emoji=False)
    if found.is_terminal or "COLUMNS" in os.environ:
        return found
    return _Console(width=_UNBROKEN, markup=False, emoji=False)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Rich would end the program with status 1, which means something else here."""
        raise BrokenPipeError


def until_closed(run: Callable[[], int]) -> int:
    """What ``run`` returns; 141 as soon as nobody reads standard output any more, as behind ``| head``.

    Source of the method: https://docs.python.org/3/library/signal.html#note-on-sigpipe
    """
    try:
        try:
            return run()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not _is_closed():  # it is another pipe that broke
            raise
        # Python flushes once more when it ends, and what is left must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _PIPE_CLOSED


def _is_closed() -> bool:
    """Whether not even the end of a line can be written."""
    try:
        sys.stdout.write("\n")
        sys.stdout.flush()
    except BrokenPipeError:
        return True
    return False
