"""Find what a run starts from: a checkpoint to resume, or weights to load."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.checkpoint import (
    Checkpoint,
    as_path,
    find_latest,
    is_checkpoint,
    iteration_of,
    newest_complete,
    passed_over,
)
from ...core.checkpoint.directory import ANOTHER_NAME, LATEST
from ...core.checkpoint.paths import is_local, reaching
from ...core.comm.collectives import broadcast_object
from ...core.comm.joint_errors import raising_together, told_by_rank_0
from ...core.errors import CheckpointError
from ...core.supervision import RESTARTS, job, restarts
from ..options import Resume
from .tier_notes import RESUMED, newest_fast

if TYPE_CHECKING:
    from ..run import Run


def find_source(run: Run) -> tuple[str | Path | None, Resume | None]:
    """Return the checkpoint or file to start from, and the pieces to resume; None as pieces: only load its weights.

    With ``resume=True``, ``load_from`` is the checkpoint to resume. If it is a file of weights it is what the first start begins
    with, and what later ones take parameters from that checkpoints leave out.
    """
    resumed, load_from = run.options.resume_options, run.options.load_from
    if resumed is None:
        return load_from, None
    if resumed.path is None and load_from is not None and _is_only_weights(load_from):
        found = newest_checkpoint(run)
        return (load_from, None) if found is None else (found, resumed)
    start = resumed.path or load_from or newest_checkpoint(run)
    if start is None and (other := told_by_rank_0(lambda: _of_mmengine(as_path(run.checkpoint_dir)))) is not None:
        raise not_resumable(other)
    return start, resumed


def check_resumable(path: Path) -> None:
    """Raise CheckpointError for a file of weights; a collective."""
    if is_local(path) and told_by_rank_0(path.is_file):
        raise not_resumable(path)


def not_resumable(path: Path) -> CheckpointError:
    """Return the error of resuming from what only weights are read of."""
    return CheckpointError(
        f"{path}: cannot be resumed, it is no checkpoint of flextrain; as with those of MMEngine's runner, "
        f'load_from="{path}" begins with its weights, resume=False or another work_dir begins anew'
    )


def _is_only_weights(path: str | Path) -> bool:
    """Whether no run has saved this, so that it gives weights to start from, and what checkpoints leave out."""
    found = as_path(path)
    return is_local(found) and told_by_rank_0(lambda: found.exists() and not is_checkpoint(found))


def find_start(run: Run) -> tuple[str | Path | None, Resume | None]:
    """Return what training starts from; after a restart by `flextrain run` the newest checkpoint of this job, if it has one.

    Other checkpoints in the folder may be of an older run, which the script does not go on with.
    """
    if not restarts():
        return find_source(run)
    found = newest_checkpoint(run)
    with raising_together():  # only rank 0 looks
        is_own = found is not None and run.rank == 0 and _job_of(found) == job()
    if not broadcast_object(is_own):
        run.logger.info(
            f"Restart {restarts()} ({RESTARTS}): this job has saved no checkpoint yet, it starts as the script says"
        )
        return find_source(run)
    run.logger.info(f"Restart {restarts()} ({RESTARTS}): resumes this job's newest checkpoint, {found}")
    return found, Resume()


def _job_of(path: Path) -> object:
    """Return the job that has saved a checkpoint, if that says so."""
    meta = Checkpoint.open(path).values.get("meta")
    return meta.get("job") if isinstance(meta, dict) else None


def newest_checkpoint(run: Run) -> Path | None:
    """Return rank 0's newest checkpoint of both tiers; other machines' view of a shared folder may be seconds old."""
    found, wrong, marked, why = None, None, [], ""
    folder = run.checkpoint_dir
    if run.rank == 0:
        # An error that rank 0 kept to itself would leave the others waiting for its message.
        try:
            with reaching(folder):
                found, why = newest_of_both_tiers(run)
                marked = passed_over(folder, found)
        except CheckpointError as error:
            wrong = str(error)
        except OSError as error:
            wrong = f"{error.filename or folder}: cannot be read, {error.strerror or error}"
    # The path is sent as text, because not every path-like object can be pickled.
    name, wrong = broadcast_object((found and str(found), wrong))
    if wrong:
        raise CheckpointError(wrong)
    if why and run.rank == 0:
        run.logger.info(why)
    if marked:  # only on rank 0, which writes the log
        run.logger.warning(
            f"{', '.join(marked)} in {folder}: skipped, their weights hold NaN or infinity; "
            f'resume="path" accepts one of them'
        )
    return as_path(name) if name else None


def newest_of_both_tiers(run: Run) -> tuple[Path | None, str]:
    """The checkpoint that ``resume=True`` continues from, and one line why it is this one; empty without a fast tier."""
    fast, iteration, why_not = newest_fast(run)
    try:
        ordinary = _latest_or_newest(run)
        reached = -1 if ordinary is None else iteration_of(ordinary)
    except CheckpointError as error:
        if fast is None:
            raise
        return fast, f"Of both tiers {fast} is resumed, iteration {iteration}: {error}"
    if fast is None:
        return ordinary, f"{ordinary} is resumed, {why_not}" if ordinary and why_not else why_not
    if ordinary is None or iteration > reached:
        other = "there is none" if ordinary is None else f"{ordinary} has {reached}"
        return fast, f"Of both tiers {fast} is resumed, with iteration {iteration}: {other}"
    return ordinary, f"Of both tiers {ordinary} is resumed, with iteration {reached}: {fast} has {iteration}"


def _of_mmengine(folder: Path) -> Path | None:
    """Return the newest checkpoint that MMEngine's runner saved in a folder, if there is one."""
    if not is_local(folder) or not folder.is_dir():
        return None
    note = folder / "last_checkpoint"
    named = folder / Path(note.read_text(errors="replace").strip()).name if note.is_file() else folder
    if named != folder and named.exists():
        return named
    numbers = {path: _SAVED.fullmatch(path.name) for path in folder.glob("*.pth")}
    found = [(match[1], int(match[2]), path) for path, match in numbers.items() if match]
    return max(found)[-1] if found else None


# Under DeepSpeed they are folders.
_SAVED = re.compile(r"(epoch|iter)_(\d{1,12})\.pth")


def _latest_or_newest(run: Run) -> Path | None:
    """Return the checkpoint that ``latest`` names; if that is gone, the newest complete one that can be resumed."""
    folder = run.checkpoint_dir
    wrong: CheckpointError | None = None
    try:
        found = find_latest(folder)
    except CheckpointError as error:
        found, wrong = None, error
    if found is not None:
        return found
    instead = newest_complete(folder, lambda checkpoint: RESUMED in checkpoint.values and not checkpoint.nonfinite)
    if instead is None and wrong is not None:
        raise wrong
    if instead is not None:
        reason = f"{folder / LATEST}: is missing" if wrong is None else str(wrong).removesuffix(ANOTHER_NAME)
        run.logger.warning(f"{reason}; {instead.name} is resumed, the newest complete checkpoint there")
    return instead
