"""Oversight: what looks after a run beside training, in one thread per run."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ...core.base.events import PROGRESS, Progress, ProgressFile, append_event, heartbeats, job, restarts
from ...core.comm.agreement import Bulletin
from ..options import PreemptionOptions, WatchdogOptions
from .monitor import Monitor
from .preemption import Preemption
from .termination import tell_others

if TYPE_CHECKING:
    from ..run import Run
    from .watchdog import Watchdog


class Oversight:
    """The Monitor of a run, the Bulletin that its watchers share, and the watchers.

    It is made before processes wait for each other, and starts when all have met. It ends with the run: when the runner
    is no longer used, or when this process has left the process group. Watchers get no strong reference to the run,
    which would then never end.
    """

    def __init__(self, options: PreemptionOptions | None) -> None:
        self.bulletin: Bulletin | None = None
        """Made by ``start`` if there are several processes. Only watchers may use it, because it belongs to their thread."""
        self.monitor: Monitor | None = None
        """Made by ``start`` if there are watchers."""
        self.watchdog: Watchdog | None = None
        """What watches several processes; None for one."""
        self._watchers: list[Callable[[], None]] = []
        self._group: object = None
        self.preemption = Preemption(options)

    def watch_processes(self, options: WatchdogOptions | None) -> None:
        """Let a Watchdog watch the processes of the run; before ``start``, on every process."""
        from .watchdog import Watchdog

        self.watchdog = Watchdog(self, options)

    @contextmanager
    def watching(self, run: Run, watchdog: Watchdog) -> Iterator[None]:
        """Context in which the watchdog watches, and tells the other processes if this one fails in setting up."""
        with watchdog.watching(run):
            try:
                yield
            except BaseException as error:
                if not watchdog.has_told:
                    tell_others(run, error, watchdog)
                raise

    def add(self, watcher: Callable[[], None]) -> None:
        """Let ``watcher`` be called several times a second, in the order of adding; before ``start``, on every process."""
        self._watchers.append(watcher)

    def start(self, run: Run) -> None:
        """Start the thread if there are watchers; every process calls it at the same point, and has the same watchers."""
        self.preemption.start(run)
        if self.preemption.needs_thread:
            self._watchers.insert(0, self.preemption.watch)
        if not self._watchers:
            return
        if run.world_size > 1:
            self.bulletin = self.preemption.bulletin = Bulletin()
            self._group = dist.group.WORLD
        self.monitor = Monitor([self._end_with_the_group, *self._watchers])
        self.monitor.start()
        weakref.finalize(run, self.monitor.stop)

    def stop(self) -> None:
        """Call no watcher any more."""
        if self.monitor is not None:
            self.monitor.stop()

    def wake(self) -> None:
        """Let the watchers be called at once."""
        if self.monitor is not None:
            self.monitor.wake()

    def _end_with_the_group(self) -> None:
        """Stop once this process has left the process group, with which the store may end."""
        if self._group is not None and not (dist.is_initialized() and dist.group.WORLD is self._group):
            self.stop()
            self.preemption.cut_off()


# The progress of a run, for `flextrain run` and for ``events.jsonl``.


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
    path = os.environ.get(PROGRESS)
    with _written_down(run, path) if path and run.strategy.launch.local_rank == 0 else nullcontext():
        yield
    if run.rank == 0:
        append_event(run.work_dir, "finished", iter=run.iter)


@contextmanager
def _written_down(run: Run, path: str) -> Iterator[None]:
    began, first, file = run.iter, run.train_loop.start_iter, ProgressFile(path)

    def write(is_training: bool = True) -> None:
        nonlocal began
        if (last := run.train_loop.start_iter) != first:  # it goes on from another checkpoint, earlier perhaps
            began = min(began, last)
        beat = " ".join(map(str, (*run.progress(), heartbeats()))) if is_training else ""
        file.write(Progress(run.work_dir, began, run.iter, beat))

    monitor = Monitor([write], period_s=_PERIOD_S)
    write()
    monitor.start()
    try:
        yield
    finally:
        monitor.stop()
        monitor.join(_LAST_LOOK_S)  # else it might write an older iteration over the last one
        write(is_training=False)
        file.close()
