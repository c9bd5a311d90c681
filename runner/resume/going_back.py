"""Going back: a training goes on from an earlier checkpoint of its own, and leaves out the data since then."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.base.events import append_event
from ...core.checkpoint import Checkpoint, as_path, complete_ones, iteration_of, remove_checkpoint
from ...core.checkpoint.directory import mark_latest
from ...core.comm.agreement import told_by_rank_0
from ...strategies.parts import meet
from .choose_checkpoint import RESUMED, GoBack

if TYPE_CHECKING:
    from ..run import Run


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
    left = loop.state_dict()
    epoch, inner, done = (left[key] or 0 for key in ("epoch", "inner", "iter"))
    end = epoch, data.lasting_position(epoch, inner)
    told_by_rank_0(lambda: _remove_later(run, back.path, done))
    resume()
    now = loop.state_dict()
    epoch, inner = (now[key] or 0 for key in ("epoch", "inner"))
    spans = data.leave_out((epoch, data.lasting_position(epoch, inner)), end)
    words = ", ".join(span.words() for span in spans)
    run.logger.warning(
        f"{back.why}; training goes on from {back.path}, iteration {now['iter']}, and leaves out {words}"
    )
    if run.rank == 0:
        facts = dict(
            iter=done, back_to=now["iter"], path=str(back.path), left_out=[span.model_dump() for span in spans]
        )
        append_event(run.work_dir, "went_back", **facts, reason=back.why)


def _remove_later(run: Run, path: Path, done: int) -> None:
    """Delete what was saved after ``path`` to be resumed from, and until now; the best ones stay."""
    reached = iteration_of(path)
    mark_latest(path)
    for folder in (run.checkpoint_dir, run.fast_checkpoint_dir):
        for other, iteration in complete_ones(folder).items() if folder is not None else ():
            if reached < iteration <= done and RESUMED in Checkpoint.open(as_path(other)).values:
                remove_checkpoint(other)
