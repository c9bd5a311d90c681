"""Print text in rich tables without markup: rich would read ``[deepspeed]`` as markup and drop it."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text


def add_row(table: Table, *cells: str | Text, style: str | None = None) -> None:
    """Add a row whose cells are shown without markup, on any console."""
    table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells), style=style)
