"""Find the complete checkpoints of a folder, in the order of training."""

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


def complete_ones(folder: str | os.PathLike[str]) -> dict[Path, int]:
    """The complete checkpoints in ``folder``, each with its iteration, in the order of iterations; -1: it has none.

    Clocks go back and differ between machines. Therefore the time at which they were written orders only checkpoints of
    the same iteration.
    """
    found = as_path(folder)
    with reaching(found):
        if not found.is_dir():
            return {}
        paths = [path for path in found.iterdir() if not path.name.startswith(".") and is_checkpoint(path)]
        order: dict[Path, tuple[int, float]] = {}
        for path in paths:
            with contextlib.suppress(FileNotFoundError):  # another run has just deleted it
                order[path] = iteration_of(path), (path / MANIFEST).stat().st_mtime
    return {path: order[path][0] for path in sorted(order, key=lambda path: (order[path], path.name))}


def iteration_of(path: str | os.PathLike[str]) -> int:
    """How many updates were done when the checkpoint at ``path`` was saved; -1 if it does not say, or is damaged."""
    try:
        loop = Checkpoint.open(path).values.get("loop")
    except CheckpointError:
        return -1
    found = loop.get("iter") if isinstance(loop, dict) else None
    return found if isinstance(found, int) else -1


def newest_complete(folder: str | os.PathLike[str], accepts: Callable[[Checkpoint], bool]) -> Path | None:
    """The undamaged checkpoint of the highest iteration for which ``accepts`` is true; None if there is none."""
    for path in reversed(complete_ones(folder)):
        try:
            if accepts(Checkpoint.open(path)):
                return path
        except CheckpointError:  # damaged: an older one may be whole
            continue
    return None
