"""How commands print: tables, JSON, and output into pipes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_UNBROKEN = 1000
# The status that a shell reports for a program ended by SIGPIPE: 128 + the signal's number.
_PIPE_CLOSED = 141


def print_json(value: object) -> None:
    """Print plain values as indented JSON."""
    json.dump(value, sys.stdout, indent=2)
    sys.stdout.write("\n")


def console() -> Console:
    """A console for standard output. Lines are as wide as the terminal; in a pipe they are not wrapped, so that grep works,
    and a table has a line for each row.

    Text is shown as it is, without markup. Use rich's Text for colours.
    """
    # here, because `flextrain doctor` must start without rich
    from rich.console import Console

    class UntilClosed(Console):
        as_lines = False

        def on_broken_pipe(self) -> None:
            """Raise, where rich would end the program with status 1, which has another meaning here."""
            raise BrokenPipeError

    found = UntilClosed(markup=False, emoji=False)
    if found.is_terminal or "COLUMNS" in os.environ:
        return found
    unbroken = UntilClosed(width=_UNBROKEN, markup=False, emoji=False, soft_wrap=True)
    unbroken.as_lines = True
    return unbroken


def until_closed(run: Callable[[], int]) -> int:
    """The result of ``run``; 141 as soon as the reader of standard output has left, as with ``| head``.

    Source of the method: https://docs.python.org/3/library/signal.html#note-on-sigpipe
    """
    try:
        try:
            return run()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not _is_closed():  # another pipe broke
            raise
        # Python flushes again when it ends, and that must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _PIPE_CLOSED


def _is_closed() -> bool:
    """Whether standard output accepts no more text."""
    try:
        sys.stdout.write("\n")
        sys.stdout.flush()
    except BrokenPipeError:
        return True
    return False
