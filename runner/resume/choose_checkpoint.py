"""Find what a run starts from: a checkpoint to resume, or weights to load."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.base.errors import CheckpointError
from ...core.base.events import RESTARTS, job, restarts
from ...core.checkpoint import (
    Checkpoint,
    as_path,
    complete_ones,
    find_latest,
    is_checkpoint,
    is_marked,
    iteration_of,
    newest_complete,
    passed_over,
)
from ...core.checkpoint.directory import ANOTHER_NAME, LATEST, check_no_pointer, write_file
from ...core.checkpoint.folders import is_local, reaching
from ...core.checkpoint.untrusted import one_line
from ...core.comm.agreement import raising_together, told_by_rank_0
from ...core.comm.collectives import broadcast_object
from ..options import Resume

if TYPE_CHECKING:
    from ..run import Run

# The notes by which a run knows its fast tier again, and the newest checkpoint in it.
#
# Folders such as ``/dev/shm/run`` belong to one machine and outlive runs: a note in them says whose they are. The
# folder of ordinary checkpoints has the same note. A run that begins anew gives both a new mark, also if it never
# sees the machine again on which a former run has left a fast tier.


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


def newest_fast(run: Run, without: Path | None = None) -> tuple[Path | None, int, str]:
    """The newest checkpoint of the fast tier but this that the run can resume, its iteration, and why it has none, if so."""
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
        if path == without:
            continue
        try:
            checkpoint = Checkpoint.open(path)
        except CheckpointError:  # damaged: an older one may be whole
            continue
        if RESUMED in checkpoint.values and not checkpoint.nonfinite:
            return path, iteration, ""
    return None, -1, f"the fast tier {folder} holds no checkpoint that can be resumed"


def find_source(run: Run, without: Path | None = None) -> tuple[str | Path | None, Resume | None]:
    """Return the checkpoint or file to start from, and the pieces to resume; None as pieces: only load its weights.

    With ``resume=True``, ``load_from`` is the checkpoint to resume. If it is a file of weights it is what the first start begins
    with, and what later ones take parameters from that checkpoints leave out. ``without``: one of the fast tier to pass over.
    """
    resumed, load_from = run.options.resume_options, run.options.load_from
    if resumed is None:
        return load_from, None
    if resumed.path is None and load_from is not None and _is_only_weights(load_from):
        found = newest_checkpoint(run, without)
        return (load_from, None) if found is None else (found, resumed)
    start = resumed.path or load_from or newest_checkpoint(run, without)
    if start is None and (other := told_by_rank_0(lambda: _of_mmengine(as_path(run.checkpoint_dir)))) is not None:
        raise not_resumable(other)
    return start, resumed


def check_resumable(path: Path) -> None:
    """Raise CheckpointError for a file of weights; a collective."""
    if is_local(path) and told_by_rank_0(path.is_file):
        check_no_pointer(path)
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


def find_start(run: Run, without: Path | None = None) -> tuple[str | Path | None, Resume | None]:
    """Return what training starts from; after a restart by `flextrain run` the newest checkpoint of this job, if it has one.

    Other checkpoints in the folder may be of an older run, which the script does not go on with. See ``find_source``.
    """
    if not restarts():
        return find_source(run, without)
    found = newest_checkpoint(run, without)
    with raising_together():  # only rank 0 looks
        is_own = found is not None and run.rank == 0 and _job_of(found) == job()
    if not broadcast_object(is_own):
        run.logger.info(
            f"Restart {restarts()} ({RESTARTS}): this job has saved no checkpoint yet, it starts as the script says"
        )
        return find_source(run, without)
    run.logger.info(f"Restart {restarts()} ({RESTARTS}): resumes this job's newest checkpoint, {found}")
    return found, Resume()


def _job_of(path: Path) -> object:
    """Return the job that has saved a checkpoint, if that says so."""
    meta = Checkpoint.open(path).values.get("meta")
    return meta.get("job") if isinstance(meta, dict) else None


def newest_checkpoint(run: Run, without: Path | None = None) -> Path | None:
    """Return rank 0's newest checkpoint of both tiers; other machines' view of a shared folder may be seconds old."""
    found, wrong, marked, why = None, None, [], ""
    folder = run.checkpoint_dir
    if run.rank == 0:
        # An error that rank 0 kept to itself would leave the others waiting for its message.
        try:
            with reaching(folder):
                found, why = newest_of_both_tiers(run, without)
                marked = passed_over(folder, found)
        except CheckpointError as error:
            wrong = str(error)
        except OSError as error:
            wrong = str(_unreadable(error, folder))
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


def way_on(run: Run) -> str:
    """What ``resume=True`` would do now, for the log."""
    folder = run.checkpoint_dir
    try:
        with reaching(folder):
            found = newest_of_both_tiers(run, tells=False)[0]
            others = [] if found is not None else list(complete_ones(folder))
    except (CheckpointError, OSError) as error:
        return one_line(error)
    if found is not None:
        return f"resume=True continues from {found.name if found.parent == folder else found}"
    if others:
        return f"resume=True begins anew, {others[-1].name} holds NaN or infinity, or no optimizer"
    return "no checkpoint was saved yet"


def newest_of_both_tiers(run: Run, without: Path | None = None, tells: bool = True) -> tuple[Path | None, str]:
    """The checkpoint that ``resume=True`` continues from, and one line why it is this one; empty without a fast tier."""
    fast, iteration, why_not = newest_fast(run, without)
    try:
        ordinary = _latest_or_newest(run, tells)
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


def _unreadable(error: OSError, folder: Path | str) -> CheckpointError:
    return CheckpointError(f"{error.filename or folder}: cannot be read, {error.strerror or error}")


def _of_mmengine(folder: Path) -> Path | None:
    """Return the newest checkpoint that MMEngine's runner saved in a folder, if there is one."""
    if not is_local(folder) or not folder.is_dir():
        return None
    note = folder / "last_checkpoint"
    try:
        named = folder / Path(note.read_text(errors="replace").strip()).name if note.is_file() else folder
        if named != folder and named.exists():
            return named
        numbers = {path: _SAVED.fullmatch(path.name) for path in folder.glob("*.pth")}
    except OSError as error:
        raise _unreadable(error, folder) from error
    found = [(match[1], int(match[2]), path) for path, match in numbers.items() if match]
    return max(found)[-1] if found else None


# Under DeepSpeed they are folders.
_SAVED = re.compile(r"(epoch|iter)_(\d{1,12})\.pth")


def _latest_or_newest(run: Run, tells: bool) -> Path | None:
    """Return the checkpoint that ``latest`` names; if that is gone, the newest complete one that can be resumed."""
    folder = run.checkpoint_dir
    wrong: CheckpointError | None = None
    try:
        found = find_latest(folder)
    except CheckpointError as error:
        found, wrong = None, error
    if found is not None and is_marked(found):  # a save under the same name has replaced the finite one
        wrong = CheckpointError(f'{folder / LATEST}: names "{found.name}", which holds NaN or infinity{ANOTHER_NAME}')
        found = None
    if found is not None:
        return found
    instead = newest_complete(folder, lambda checkpoint: RESUMED in checkpoint.values and not checkpoint.nonfinite)
    if instead is None and wrong is not None:
        raise wrong
    if instead is not None and tells:
        reason = f"{folder / LATEST}: is missing" if wrong is None else str(wrong).removesuffix(ANOTHER_NAME)
        run.logger.warning(f"{reason}; {instead.name} is resumed, the newest complete checkpoint there")
    return instead


class ResumeFrom(BaseException):
    """Leaves a training that goes on from another checkpoint, earlier or later, as a resumed run does.

    A hook raises it, or a strategy's ``run_window`` before its first micro-batch or after its last one, on every process. Hooks
    get it in ``on_exception``, and then ``before_train`` again. Unlike a run that goes back, this one leaves nothing out.

    Args:
        path: the checkpoint, with all that resuming needs; it may be of another run of the same configuration.
        why: for the log.
    """

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{why}; on from {path.name}")
        self.path, self.why = path, why


class GoBack(BaseException):
    """Leaves a training that goes on from an earlier checkpoint. A hook raises it after an update, on every process.

    Hooks get it in ``on_exception``, and then ``before_train`` again. What was trained on since the checkpoint is left out from then
    on, also in runs that are resumed, and later checkpoints are deleted: ``resume=True`` would go on with one of them.

    Args:
        path: the checkpoint, saved by this run with all that resuming needs.
        why: for the log.
        facts: further plain values for the event in ``events.jsonl``.
    """

    def __init__(self, path: Path, why: str, **facts: Any) -> None:
        super().__init__(f"{why}; back to {path.name}")
        self.path, self.why, self.facts = path, why, facts
