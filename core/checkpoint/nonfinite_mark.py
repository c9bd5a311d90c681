"""Find checkpoints that are marked, because tensors that training should keep finite have NaN or infinity."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ..errors import CheckpointError, counted
from .directory import read_manifest
from .newest import complete_ones
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
    """Names of the marked checkpoints in ``folder`` that are newer than ``latest`` (None: of all), oldest first."""
    written = complete_ones(folder)
    since = written.pop(latest, None) if latest else None
    return [path.name for path, when in written.items() if (since is None or when >= since) and is_marked(path)]
