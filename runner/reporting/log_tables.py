"""Tables in the log: drawn on a terminal, plain lines in files and pipes."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...core.log_marks import ON_TERMINAL

if TYPE_CHECKING:
    from rich.table import Table as RichTable


@dataclass(frozen=True)
class Table:
    """A table for the log.

    Attributes:
        title: its first line.
        columns: headings; empty ones are not shown.
        rows: the cells.
        right: indices of the columns of numbers.
        last_is_sum: whether a rule separates the last row from the others.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Collection[int] = ()
    last_is_sum: bool = False

    def as_lines(self) -> str:
        """Return the title and a line for each row."""
        rows = [self.columns, *self.rows] if any(self.columns) else list(self.rows)
        widths = [max(len(row[i]) for row in rows) for i in range(len(self.columns))]
        lines = [f"{self.title}:"]
        for row in rows:
            cells = (
                cell.rjust(width) if i in self.right else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            lines.append(f"  {'  '.join(cells)}".rstrip())
        return "\n".join(lines)

    def drawn(self) -> RichTable:
        """Return the table for a terminal."""
        from rich.box import SIMPLE_HEAD
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(
            title=Text(self.title, style="bold"),
            title_justify="left",
            box=SIMPLE_HEAD,
            show_header=any(self.columns),
            pad_edge=False,
        )
        for i, column in enumerate(self.columns):
            is_label = not any(self.columns) and i == 0
            table.add_column(
                Text(column),
                justify="right" if i in self.right else "left",
                style="dim" if is_label else None,
                no_wrap=i in self.right or is_label,
                overflow="fold",
            )
        for i, row in enumerate(self.rows):
            table.add_row(*map(Text, row), end_section=self.last_is_sum and i == len(self.rows) - 2)
        return table


def log_table(logger: logging.Logger, table: Table) -> None:
    """Log a table: drawn where the console is a terminal, elsewhere as lines."""
    logger.info(table.as_lines(), extra={ON_TERMINAL: table})
