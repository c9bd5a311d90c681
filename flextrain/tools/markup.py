"""Text of others in what rich prints: it would take ``[deepspeed]`` for markup, and leave it out."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text


def add_row(table: Table, *cells: str | Text, style: str | None = None) -> None:
    """Add a row whose cells are shown as they are, on whatever console the table is printed."""
    table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells), style=style)
