"""RunRecord: what a report needs beside scalars: ``run.json`` with the start and the end, and a file of every other rank."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from ..run import Run

FILE = "run.json"
MOST_RANKS = 64
"""Ranks that write a file, the first ones: thousands of small files would be a load for a shared disk."""
_OF_A_RANK = ("iter", "time", "data_time", "memory")


def rank_file(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank_{rank}.json"


class RunRecord:
    """Writes beside the JSON lines of a run; if there are none, it writes nothing.

    Args:
        run: the run; its visualizer is known.
    """

    def __init__(self, run: Run) -> None:
        self._folder: Path | None = run.visualizer.record_dir
        self._rank = run.rank
        self._values: dict[str, Any] = {}
        self._lines: TextIO | None = None
        self._fails = False

    @property
    def is_kept(self) -> bool:
        """Whether anything is written."""
        return self._folder is not None

    def update(self, **values: Any) -> None:
        """Write ``run.json`` again with these values in it; on rank 0."""
        if self._folder is None or self._rank != 0:
            return
        self._values |= values
        path = self._folder / FILE
        with self._surviving(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{path.name}")
            temporary.write_text(json.dumps(self._values, indent=2, default=str) + "\n", encoding="utf-8")
            temporary.replace(path)  # a reader never finds a part of it

    def add_line(self, record: Mapping[str, Any]) -> None:
        """Write what this rank has measured itself; on every rank but 0, whose records have it."""
        if self._folder is None or not 0 < self._rank < MOST_RANKS:
            return
        names = {name.removeprefix("train/"): value for name, value in record.items()}
        with self._surviving(self._folder / rank_file(self._rank)):
            if self._lines is None:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._lines = (self._folder / rank_file(self._rank)).open("a", buffering=1, encoding="utf-8")
            self._lines.write(json.dumps({name: names[name] for name in _OF_A_RANK if name in names}) + "\n")

    def close(self) -> None:
        """Close the file of this rank."""
        if self._lines is not None:
            lines, self._lines = self._lines, None
            with contextlib.suppress(OSError):  # add_line has said it
                lines.close()

    @contextlib.contextmanager
    def _surviving(self, path: Path) -> Any:
        """Context that turns the failure of storage into one warning."""
        try:
            yield
        except OSError as error:
            if not self._fails:
                logging.getLogger("flextrain").warning(f"{path}: cannot be written, {error.strerror or error}")
            self._fails = True
