"""What a run begins with: a checkpoint to resume, or weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ...core.checkpoint import find_latest, passed_over, place
from ...core.comm.collectives import broadcast_object
from ...core.errors import CheckpointError
from ..options import Resume

if TYPE_CHECKING:
    from ..run import Run


def find_source(run: Run) -> tuple[str | Path | None, Resume | None]:
    """The checkpoint or file to begin with, and what is to be resumed of it; None: it gives weights."""
    resumed, load_from = run.options.resume_options, run.options.load_from
    if resumed is None:
        return load_from, None
    return resumed.path or load_from or _newest(run), resumed


def _newest(run: Run) -> Path | None:
    """The newest checkpoint as rank 0 sees it: other machines' view of a shared folder may be seconds old."""
    found, wrong, marked = None, None, []
    if run.rank == 0:
        try:
            found = find_latest(run.checkpoint_dir)
            marked = passed_over(run.checkpoint_dir, found)
        except CheckpointError as error:
            wrong = str(error)
    # As text, because not everything that behaves like a path can be sent.
    name, wrong = broadcast_object((found and str(found), wrong))
    if wrong:
        raise CheckpointError(wrong)
    if marked:  # on rank 0, which is the one that is heard
        run.logger.warning(
            f"{', '.join(marked)} in {run.checkpoint_dir}: passed over, with NaN or infinity in the weights; "
            f'resume="path" takes one of them all the same'
        )
    return place(name) if name else None
