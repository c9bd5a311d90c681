"""Departure: how the main thread of a process leaves a run that has to end, together with those of the other processes."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable

from .common_end import TOGETHER_S
from .last_words import leave

MAIN_S = 0.5
"""Seconds after which a main thread that does not return to Python is left behind."""


class Departure:
    """One departure of this process.

    The main thread raises Terminated, in the handler of a signal that another thread sends it, or by itself. Who leaves
    early would take the store from the others, or look to them like a failure: so it waits for them, not for long.
    """

    def __init__(self) -> None:
        self.is_due = False
        """True once a signal means: leave now."""
        self.has_begun = False
        """True once the main thread raises Terminated."""
        self._is_awaited = False
        self._all_leave = threading.Event()

    def begin(self) -> None:
        """Say, in the main thread, that it raises Terminated."""
        self.is_due = self.has_begun = True

    def wait(self) -> None:
        """Wait, in the main thread, until the other thread has met those of the other processes."""
        self._is_awaited = True
        self._all_leave.wait(TOGETHER_S)

    def meet_if_awaited(self, meet: Callable[[], None]) -> None:
        """Let the main thread, which leaves by itself and waits for the others, go on once they leave too."""
        if self._is_awaited and not self._all_leave.is_set():
            meet()
            self._all_leave.set()

    def call(
        self, number: int, meet: Callable[[], None], tell_that_it_is_stuck: Callable[[], None], status: int
    ) -> None:
        """Make the main thread raise Terminated; end the process if it is in a call that does not return.

        Args:
            number: of the signal whose handler raises it.
            meet: waits for the other processes to leave too.
            tell_that_it_is_stuck: writes to the log.
            status: exit status of the process if this thread has to end it.
        """
        self.is_due = True
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, number)
        deadline = time.monotonic() + MAIN_S
        while not self.has_begun and time.monotonic() < deadline:
            time.sleep(0.01)
        is_stuck = not self.has_begun
        if is_stuck:
            self.has_begun = True
            tell_that_it_is_stuck()
        meet()
        self._all_leave.set()
        if is_stuck:
            leave(status)
