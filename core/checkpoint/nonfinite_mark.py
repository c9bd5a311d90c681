"""Find checkpoints that are marked, because tensors that training should keep finite have NaN or infinity."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ..errors import CheckpointError, counted
from .directory import read_manifest
from .newest import complete_ones, iteration_of
from .paths import as_path

_NAMED = 3


def what_is_not_finite(keys: Sequence[str], noun: str = "tensor") -> str:
    """Text for a list of keys: how many there are, and the first few of them."""
    names = ", ".join(keys[:_NAMED])
    more = f" and {len(keys) - _NAMED} more" if len(keys) > _NAMED else ""
    return f"{counted(len(keys), noun)} ({names}{more})"


def is_marked(path: str | os.PathLike[str]) -> bool:
    """Whether the checkpoint at ``path`` is marked; False if there is no complete one."""
    try:
        return bool(read_manifest(as_path(path)).nonfinite)
    except CheckpointError:
        return False


def passed_over(folder: str | os.PathLike[str], latest: Path | None) -> list[str]:
    """Names of the marked checkpoints in ``folder`` that come after ``latest`` (None: all), in the order of iterations."""
    found = complete_ones(folder)
    newer = list(found)
    if latest in found:
        newer = newer[newer.index(latest) + 1 :]
    elif latest is not None:  # in another folder
        reached = iteration_of(latest)
        newer = [path for path, iteration in found.items() if iteration > reached]
    return [path.name for path in newer if is_marked(path)]
