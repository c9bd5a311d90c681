"""FittedTable: a table that never breaks a name, whatever the width of the terminal, and that grep can read in a pipe."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

WIDEST = 120
"""Columns that a table takes of a wide terminal, unless its names need more: long lines are hard to read."""


class FittedTable(Table):
    """A table whose columns wrap between words only.

    If the terminal is too narrow for that, every row becomes a paragraph. A console with the attribute ``as_lines``
    gets one line per row, without a frame.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Choose the form, and render."""
        rows = self._texts()
        if getattr(console, "as_lines", False):
            yield from self._lines(rows)
            return
        frame = 3 * len(self.columns) + 1
        least = [_longest([word for row in rows for word in row[i].plain.split()]) for i in range(len(self.columns))]
        widths = [
            _longest([line for row in rows for line in row[i].plain.splitlines()]) for i in range(len(self.columns))
        ]
        if sum(least) + frame > options.max_width:
            yield from self._paragraphs(rows)
            return
        room = min(options.max_width, max(WIDEST, sum(least) + frame)) - frame
        while sum(widths) > room:
            spare, widest = max((widths[i], i) for i in range(len(widths)) if widths[i] > least[i])
            widths[widest] = spare - 1
        for column, width in zip(self.columns, widths, strict=True):
            column.width = width
        yield from super().__rich_console__(console, options)

    def _texts(self) -> list[list[Text]]:
        """Return the headers and the rows as text."""
        columns = [[column.header, *column.cells] for column in self.columns]
        return [[_text(cell) for cell in row] for row in zip(*columns, strict=True)]

    def _lines(self, rows: list[list[Text]]) -> Iterator[Text]:
        if self.title:
            yield Text(_text(self.title).plain, no_wrap=True)
        lines = [[", ".join(cell.plain.splitlines()) for cell in row] for row in rows]
        widths = [_longest(list(column)) for column in zip(*lines, strict=True)]
        for line in lines:
            cells = [
                cell.rjust(width) if column.justify == "right" else cell.ljust(width)
                for cell, width, column in zip(line, widths, self.columns, strict=True)
            ]
            yield Text("  ".join(cells).rstrip(), no_wrap=True, overflow="ignore")
        yield from self._caption()

    def _paragraphs(self, rows: list[list[Text]]) -> Iterator[Any]:
        if self.title:
            yield Text(_text(self.title).plain, style="italic")
        headers, *rest = rows
        for first, *others in rest:
            yield Text.assemble((", ".join(first.plain.splitlines()), "bold"))
            pairs = [
                Text(f"{header.plain}: " if header.plain else "") + Text(", ").join(cell.split("\n"))
                for header, cell in zip(headers[1:], others, strict=True)
                if cell.plain
            ]
            yield Padding(Text("; ").join(pairs), (0, 0, 0, 2))
        yield from self._caption()

    def _caption(self) -> Iterator[Text]:
        if self.caption:
            yield _text(self.caption)


def _text(cell: Any) -> Text:
    return cell if isinstance(cell, Text) else Text(str(cell))


def _longest(texts: list[str]) -> int:
    return max((Text(text).cell_len for text in texts), default=0)


# Print text in rich tables without markup: rich would read ``[deepspeed]`` as markup and drop it.


def as_text(shown: RenderableType, width: int) -> str:
    """Return what a console of so many columns shows, without colours."""
    console = Console(width=width, color_system=None, force_terminal=False, markup=False, emoji=False)
    with console.capture() as capture:
        console.print(shown)
    return capture.get()


def add_row(table: Table, *cells: str | Text, style: str | None = None) -> None:
    """Add a row whose cells are shown without markup, on any console."""
    table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells), style=style)
