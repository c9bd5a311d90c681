"""Where commands print."""

from __future__ import annotations

import json
import os
import sys

from rich.console import Console

_UNBROKEN = 1000


def print_json(value: object) -> None:
    """Print plain values as indented JSON."""
    json.dump(value, sys.stdout, indent=2)
    sys.stdout.write("\n")


def console() -> Console:
    """Standard output: lines are as long as the terminal, and elsewhere as their text, so that grep finds whole names."""
    found = Console()
    return found if found.is_terminal or "COLUMNS" in os.environ else Console(width=_UNBROKEN)
