"""Format sizes, shapes, values and tables for the commands."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.text import Text

    from ..tools.tables import FittedTable

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
    from ..tools.tables import FittedTable  # here, because `flextrain doctor` must start without rich

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
