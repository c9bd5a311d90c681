"""The progress of a run, for `flextrain run` and for ``events.jsonl``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..core.events import append_event
from ..core.supervision import PROGRESS, Progress, ProgressFile, job, restarts
from .monitor import Monitor

if TYPE_CHECKING:
    from .run import Run

_PERIOD_S = 0.05
"""Seconds after which an update is written down: a process that is killed sooner seems to have made none."""
_LAST_LOOK_S = 5.0


@contextmanager
def told_progress(run: Run) -> Iterator[None]:
    """Write events at the beginning and end of training, and meanwhile how far it is if `flextrain run` asks for that."""
    facts: dict[str, Any] = {"iter": run.iter, "processes": run.world_size}
    if job():
        facts |= {"job": job(), "restarts": restarts()}
    if run.rank == 0:
        append_event(run.work_dir, "started", **facts, log=run.log_dir)
    with _written_down(run):
        yield
    if run.rank == 0:
        append_event(run.work_dir, "finished", iter=run.iter)


@contextmanager
def _written_down(run: Run) -> Iterator[None]:
    path = os.environ.get(PROGRESS)
    if not path or os.environ.get("LOCAL_RANK") != "0":
        yield
        return
    began, file = run.iter, ProgressFile(path)

    def write() -> None:
        file.write(Progress(run.work_dir, began, run.iter))

    monitor = Monitor([write], period_s=_PERIOD_S)
    write()
    monitor.start()
    try:
        yield
    finally:
        monitor.stop()
        monitor.join(_LAST_LOOK_S)  # else it might write an older iteration over the last one
        write()
        file.close()
