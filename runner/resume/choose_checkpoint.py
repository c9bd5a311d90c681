"""Find what a run starts from: a checkpoint to resume, or weights to load."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ...core.checkpoint import as_path, find_latest, passed_over
from ...core.comm.collectives import broadcast_object
from ...core.errors import CheckpointError
from ..options import Resume

if TYPE_CHECKING:
    from ..run import Run


def find_source(run: Run) -> tuple[str | Path | None, Resume | None]:
    """Return the checkpoint or file to start from, and the pieces to resume; None as pieces: only load its weights."""
    resumed, load_from = run.options.resume_options, run.options.load_from
    if resumed is None:
        return load_from, None
    return resumed.path or load_from or _newest(run), resumed


def _newest(run: Run) -> Path | None:
    """Return rank 0's newest checkpoint; other machines' view of a shared folder may be seconds old."""
    found, wrong, marked = None, None, []
    if run.rank == 0:
        try:
            found = find_latest(run.checkpoint_dir)
            marked = passed_over(run.checkpoint_dir, found)
        except CheckpointError as error:
            wrong = str(error)
    # The path is sent as text, because not every path-like object can be pickled.
    name, wrong = broadcast_object((found and str(found), wrong))
    if wrong:
        raise CheckpointError(wrong)
    if marked:  # only on rank 0, which writes the log
        run.logger.warning(
            f"{', '.join(marked)} in {run.checkpoint_dir}: skipped, their weights hold NaN or infinity; "
            f'resume="path" accepts one of them'
        )
    return as_path(name) if name else None
