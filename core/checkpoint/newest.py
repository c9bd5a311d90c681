"""Find the complete checkpoints of a folder, by the time at which they were written."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from ..errors import CheckpointError
from .directory import is_checkpoint
from .load.checkpoint import Checkpoint
from .manifest import MANIFEST
from .paths import as_path, reaching


def complete_ones(folder: str | os.PathLike[str]) -> dict[Path, float]:
    """The complete checkpoints in ``folder``, oldest first, with the time at which each was written (seconds)."""
    found = as_path(folder)
    with reaching(found):
        if not found.is_dir():
            return {}
        paths = [path for path in found.iterdir() if not path.name.startswith(".") and is_checkpoint(path)]
        written = {}
        for path in paths:
            with contextlib.suppress(FileNotFoundError):  # another run has just deleted it
                written[path] = (path / MANIFEST).stat().st_mtime
    return {path: written[path] for path in sorted(written, key=lambda path: (written[path], path.name))}


def newest_complete(folder: str | os.PathLike[str], accepts: Callable[[Checkpoint], bool]) -> Path | None:
    """The newest complete and undamaged checkpoint in ``folder`` for which ``accepts`` is true; None if there is none."""
    for path in reversed(complete_ones(folder)):
        try:
            if accepts(Checkpoint.open(path)):
                return path
        except CheckpointError:  # damaged: an older one may be whole
            continue
    return None
