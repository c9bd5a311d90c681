"""How commands print: tables, JSON, and output into pipes."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from ..tables import FittedTable

__all__ = [  # for commands of other packages too
    "FoldedHelp",
    "console",
    "finite_json",
    "fitted_table",
    "human_size",
    "number",
    "print_json",
    "red",
    "shape_text",
]

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

    Text is shown as it is, without markup, and without the colours that rich gives to numbers. Use rich's Text for colours.
    """
    # here, because `flextrain doctor` must start without rich
    from rich.console import Console

    class UntilClosed(Console):
        as_lines = False

        def on_broken_pipe(self) -> None:
            """Raise, where rich would end the program with status 1, which has another meaning here."""
            raise BrokenPipeError

    found = UntilClosed(markup=False, emoji=False, highlight=False)
    if found.is_terminal:
        return found
    unbroken = UntilClosed(width=_UNBROKEN, markup=False, emoji=False, highlight=False, soft_wrap=True)
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


# Format sizes, shapes, values and tables for the commands.


SHOWN_CHARACTERS = 120


class FoldedHelp(argparse.HelpFormatter):
    """Folds the paragraphs of a description to the terminal's width; indented lines stay as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        # A private method: argparse's own formatters change a description in this way, and there is no public one.
        found = []
        for stays, group in itertools.groupby(text.splitlines(), lambda line: not line or line.startswith(" ")):
            lines = list(group)
            found.append("\n".join(lines) if stays else textwrap.fill(" ".join(lines), width))
        return textwrap.indent("\n".join(found), indent)


def shape_text(shape: Sequence[int]) -> str:
    """``2 x 3`` for a shape."""
    return " x ".join(map(str, shape)) or "scalar"


def both(a: object, b: object) -> str:
    """One text for two equal values, ``a | b`` for different ones."""
    return str(a) if a == b else f"{a} | {b}"


def number(value: float | None) -> str:
    """A number with three digits; empty for None."""
    return "" if value is None else f"{value:.3g}"


def fitted_table(*headers: str, title: str | None = None) -> FittedTable:
    """A table that fits the terminal without breaking a name, and whose rows are lines in a pipe."""
    from ..tables import FittedTable  # here, because `flextrain doctor` must start without rich

    return FittedTable(*headers, title=title, title_justify="left")


def as_text(value: object) -> str:
    """The value as text; empty for None."""
    return "" if value is None else str(value)


def red(text: str) -> Text:
    """Red text."""
    from rich.text import Text

    return Text(text, style="red")


def shortened(value: Any) -> str:
    """A plain value as JSON of at most 120 characters."""
    text = json.dumps(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 4]} ..."


def human_size(size: int) -> str:
    """A number of bytes in a suitable unit: ``1.5 MB``."""
    if size < 1000:
        return f"{size} bytes"
    exponent = min(int(math.log10(size)) // 3, 4)
    return f"{size / 1000**exponent:.1f} {('kB', 'MB', 'GB', 'TB')[exponent - 1]}"


def finite_json(value: Any) -> Any:
    """``value`` with the strings "inf", "-inf" and "nan" for numbers that JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: finite_json(item) for key, item in value.items()}
    return [finite_json(item) for item in value] if isinstance(value, (list, tuple)) else value
