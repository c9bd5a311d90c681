"""The notes by which a run knows its fast tier again, and the newest checkpoint in it.

Folders such as ``/dev/shm/run`` belong to one machine and outlive runs: a note in them says whose they are. The folder of
ordinary checkpoints has the same note. A run that begins anew gives both a new mark, also if it never sees the machine
again on which a former run has left a fast tier.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.checkpoint import Checkpoint, complete_ones
from ...core.checkpoint.directory import write_file
from ...core.checkpoint.paths import reaching
from ...core.errors import CheckpointError

if TYPE_CHECKING:
    from ..run import Run

NOTE = ".flextrain_run"

RESUMED = "optim.wrapper"
"""An entry of every checkpoint that can be resumed; that of ``save_best`` has none."""


@dataclass(frozen=True)
class Note:
    """Whose checkpoints a folder holds."""

    run: str
    """The mark of a run, from its first start on through all restarts."""
    checkpoints: str
    """The folder of its ordinary checkpoints."""


def new_note(checkpoints: Path) -> Note:
    """A note with a new mark, for a run that begins."""
    return Note(uuid.uuid4().hex, str(checkpoints))


def read_note(folder: Path) -> Note | None:
    """The note in a folder; None if there is none that can be read."""
    path = folder / NOTE
    try:
        with reaching(path):
            found = json.loads(path.read_bytes()) if path.is_file() else None
    except (ValueError, OSError):
        return None
    if not isinstance(found, Mapping):
        return None
    values = found.get("run"), found.get("checkpoints")
    return Note(*values) if all(isinstance(value, str) for value in values) else None  # type: ignore[arg-type]


def write_note(folder: Path, note: Note) -> None:
    """Leave a note in a folder."""
    write_file(folder / NOTE, json.dumps(vars(note)).encode())


def newest_fast(run: Run) -> tuple[Path | None, int, str]:
    """The newest checkpoint of the fast tier that the run can resume, its iteration, and why it has none, if so."""
    folder = run.fast_checkpoint_dir
    if folder is None:
        return None, -1, ""
    held = complete_ones(folder)
    if not held:
        return None, -1, f"the fast tier {folder} holds no checkpoint"
    note = read_note(folder)
    if note is None or note != read_note(run.checkpoint_dir):
        return None, -1, f"the fast tier {folder} holds checkpoints of another run"
    for path, iteration in reversed(held.items()):
        try:
            checkpoint = Checkpoint.open(path)
        except CheckpointError:  # damaged: an older one may be whole
            continue
        if RESUMED in checkpoint.values and not checkpoint.nonfinite:
            return path, iteration, ""
    return None, -1, f"the fast tier {folder} holds no checkpoint that can be resumed"
