"""Tell when a CheckpointHook saves, and if its interval does not end within the run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...core.errors import counted

if TYPE_CHECKING:
    from ..run import Run


def beyond_the_end(run: Run, interval: int, save_begin: int, *, by_epoch: bool, save_last: bool) -> str | None:
    """Return a line for the log, or None if the hook saves in the course of the run; see CheckpointHook."""
    end, unit = (run.max_epochs, "epoch") if by_epoch else (run.max_iters, "iteration")
    key, value = ("interval", interval) if interval > end else ("save_begin", save_begin)
    if value <= end:
        return None
    then = "one checkpoint is saved, at the end" if save_last else "no checkpoint is saved"
    return f"CheckpointHook.{key}: {value} is beyond the {counted(end, unit)} of training, {then}; give at most {end}"


def has_no_epochs(run: Run, interval: int, *, by_epoch: bool, save_last: bool) -> str | None:
    """Return a line for the log if the interval counts epochs, and a training by iterations is longer, or may be."""
    loop = run.train_loop
    if loop.by_epoch or not by_epoch or interval < 1:
        return None
    if loop.data.epoch_length is not None and interval >= run.max_epochs:
        return None
    then = "one checkpoint is saved, at its end" if save_last else "no checkpoint is saved"
    return (
        f"CheckpointHook.by_epoch: True counts epochs, of which training by iterations has only one, so {then}; "
        "checkpoint=dict(by_epoch=False, interval=...) counts iterations"
    )


def when_saved(interval: int, *, save_last: bool, saves_best: bool) -> str:
    """What the log adds to the folder if there are no checkpoints at an interval: ``, at the end only``."""
    if interval > 0:
        return ""
    times = (["at the end"] if save_last else []) + (["at a new best value"] if saves_best else [])
    return f", {' and '.join(times) or 'when the run is preempted'} only (CheckpointHook.interval={interval})"
