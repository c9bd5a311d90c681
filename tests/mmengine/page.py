"""The tables of docs/mmengine_keywords.md and docs/mmengine_names.md: the names of MMEngine, and what stands beside them."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any, NamedTuple

PAGE = "\n".join(
    (Path(__file__).parents[2] / "docs" / f"mmengine_{part}.md").read_text() for part in ("keywords", "names")
)
MODULES = [
    "runner",
    "model",
    "optim",
    "hooks",
    "evaluator",
    "dataset",
    "logging",
    "visualization",
    "registry",
    "config",
]
MODULES += ["_strategy"]


class Row(NamedTuple):
    """One name of a table: the state, and what stands beside it."""

    name: str
    state: str
    here: str


def rows(title: str) -> list[Row]:
    """The rows of the section with this title."""
    section = re.split(rf"^#+ {re.escape(title)}\n", PAGE, flags=re.MULTILINE)[1]
    section = re.split(r"^#+ ", section, flags=re.MULTILINE)[0]
    found = []
    for line in section.splitlines():
        if line.startswith("| `"):
            names, state, here = (cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1])
            found += [Row(name, state, here) for name in re.findall(r"`([^`]+)`", names)]
    return found


def path_in(row: Row) -> str:
    found = re.match(r"`(flextrain[\w.]*)`", row.here)
    assert found, f"{row.name}: begin with where it is, as in `flextrain.runner`"
    return found[1]


def find(row: Row) -> Any:
    """What a row says is the counterpart: the object of its path, or the row's name in the module of that path."""
    path = path_in(row)
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError:
        parent, _, name = path.rpartition(".")
        return getattr(importlib.import_module(parent), name)
    return getattr(module, row.name)
