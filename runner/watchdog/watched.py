"""Watched: the run that the main thread of this process is in, as the watchdog's threads read it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from ...core.errors import StrategyError
from ...core.heartbeat import heartbeats
from .ending import Ending
from .whereabouts import Whereabouts, is_compiling, whereabouts

if TYPE_CHECKING:
    from ..run import Run


class Watched:
    """A run from its beginning to its end on this process; made by the thread that runs it.

    Args:
        run: the run.
        number: its number, the same on all processes.
    """

    def __init__(self, run: Run, number: int) -> None:
        self.run, self.number = run, number
        self.thread = threading.get_ident()
        self.failed = ""
        """The error with which this process is leaving the run."""
        self.ending: Ending | None = None
        """How another process has left it."""
        self._start = self._found = (*run.progress(), heartbeats())
        self._count = 0
        self._lock = threading.Lock()

    def count(self) -> int:
        """A number that changes while the main thread gets on."""
        found = (*self.run.progress(), heartbeats())
        with self._lock:
            if found != self._found:
                self._found = found
                self._count += 1
            return self._count

    def is_first(self) -> bool:
        """Whether this process has not made the first update, or evaluated the first batch."""
        return self.run.progress() == self._start[:-1]

    def is_compiling(self) -> bool:
        """Whether this process compiles a model."""
        return is_compiling(self.thread)

    def whereabouts(self) -> Whereabouts:
        """What the main thread is doing."""
        run = self.run
        try:
            model = run.strategy.module
        except StrategyError:  # it is still being built
            model = None
        return whereabouts(self.thread, run.rank, run.iter, model, self.failed)
