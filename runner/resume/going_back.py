"""Going back: a training goes on from an earlier checkpoint of its own, and leaves out the data since then; or from any other."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.base.events import append_event, read_events
from ...core.checkpoint import Checkpoint, as_path, complete_ones, iteration_of, remove_checkpoint
from ...core.checkpoint.directory import mark_latest
from ...core.comm.agreement import told_by_rank_0
from ...strategies.parts import meet
from ..data.dataloaders import LeftOut
from .choose_checkpoint import RESUMED, GoBack, ResumeFrom

if TYPE_CHECKING:
    from ..loops.train import TrainLoop
    from ..run import Run

_EVENT = "went_back"


def newest_until(run: Run, iteration: int, others: Collection[Path] = ()) -> Path | None:
    """Return the newest checkpoint of a run to resume from, of at most so many updates; None if there is none. For rank 0.

    Args:
        run: the run.
        iteration: the number of updates.
        others: checkpoints in its folder that another run has saved; this run may have replaced some since.
    """
    for path, done in reversed(complete_ones(run.checkpoint_dir).items()):
        if 0 <= done <= iteration and (path not in others or run.has_saved(path)):
            checkpoint = Checkpoint.open(path)
            if RESUMED in checkpoint.values and not checkpoint.nonfinite:
                return path
    return None


def go_on(run: Run, loop: TrainLoop, left: GoBack | ResumeFrom, resume: Callable[[], None]) -> None:
    """Resume from the checkpoint for whose sake the loop has been left; a collective. ``resume`` restores the run from ``left.path``."""
    if isinstance(left, GoBack):
        go_back(run, left, resume)
        return
    meet(run.strategy, "resuming from another checkpoint")
    run.finish_saving()
    if loop.is_torn and run.optim_wrapper is not None:  # asked for by the strategy, with whole gradients at most
        run.optim_wrapper.zero_grad()
    loop.is_torn = loop.stop_training = False
    run.logger.info(left.why)
    resume()


def go_back(run: Run, back: GoBack, resume: Callable[[], None]) -> None:
    """Resume from the checkpoint, and leave out the data since then; a collective.

    Args:
        run: the run, whose loop has been left after an update.
        back: where to.
        resume: restores the run from ``back.path``.
    """
    meet(run.strategy, "going back to a checkpoint")
    run.finish_saving()
    loop, data = run.train_loop, run.train_loop.data
    loop.stop_training = False  # whatever has ended the training is taken back
    if run.optim_wrapper is not None:  # gradients that no update has used yet are of the data that are left out
        run.optim_wrapper.zero_grad()
    left = loop.state_dict()
    epoch, inner, done = (left[key] or 0 for key in ("epoch", "inner", "iter"))
    end = epoch, data.lasting_position(epoch, inner)
    begin, reached = told_by_rank_0(lambda: _begin(back.path))
    spans = data.spans(begin, end)
    # Before anything changes: the checkpoint says nothing of it to a run that is restarted from now on.
    if run.rank == 0:
        left_out = [span.model_dump() for span in spans]
        facts = dict(iter=done, back_to=reached, path=str(back.path), left_out=left_out, reason=back.why)
        append_event(run.work_dir, _EVENT, **facts, **back.facts)
    told_by_rank_0(lambda: _remove_later(run, back.path, done))
    resume()
    data.left_out += [span for span in spans if span not in data.left_out]
    words = ", ".join(span.words() for span in spans)
    run.logger.warning(f"{back.why}; training goes on from {back.path}, iteration {reached}, and leaves out {words}")


def left_out_since(run: Run, path: Path, iteration: int) -> list[LeftOut]:
    """Return what training has left out since it went back to a checkpoint that does not know of it yet. For rank 0.

    Args:
        run: the run, of which ``events.jsonl`` is read.
        path: the checkpoint; the best one of the same update knows more.
        iteration: its updates.
    """
    found: list[LeftOut] = []
    for event in read_events(run.work_dir):
        begins_anew = event["event"] == "started" and event.get("iter") == 0
        is_saved = event["event"] == "saved" and event.get("iter") == iteration
        if begins_anew or (is_saved and as_path(event["path"]).name == path.name):
            found = []
        if event["event"] == _EVENT and event.get("back_to") == iteration:
            found += [LeftOut(**span) for span in event["left_out"]]
    return found


def noted_since_the_start(run: Run, fact: str) -> int:
    """Return the largest value of a fact that the run's goings back have noted, over all restarts; 0: none has. For rank 0."""
    largest = 0
    for event in read_events(run.work_dir):
        if event["event"] == "started" and event.get("iter") == 0:
            largest = 0
        if event["event"] == _EVENT:
            largest = max(largest, event.get(fact, 0))
    return largest


def _begin(path: Path) -> tuple[tuple[int, int], int]:
    """Epoch and lasting position of a checkpoint, and its updates."""
    values = Checkpoint.open(path).values
    loop, position = values["loop"], values["data"]["position"]
    return (loop["epoch"], loop["inner"] if position is None else position), loop["iter"]


def _remove_later(run: Run, path: Path, done: int) -> None:
    """Delete what was saved after ``path`` to be resumed from, and until now; the best ones stay."""
    reached = iteration_of(path)
    mark_latest(path)
    for folder in (run.checkpoint_dir, run.fast_checkpoint_dir):
        for other, iteration in complete_ones(folder).items() if folder is not None else ():
            if reached < iteration <= done and RESUMED in Checkpoint.open(as_path(other)).values:
                remove_checkpoint(other)
