"""Pulse: whether this process is getting on, on a clock that stands still while the process is stopped."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

_LONGEST_TICK_S = 2.0


class Clock:
    """Seconds that this process could run: a stopped or suspended one has not waited for anything.

    The method ``tick`` has to be called several times a second; what it finds missing does not count.
    """

    def __init__(self, source: Callable[[], float] = time.monotonic) -> None:
        self._source, self._last = source, source()
        self.now = 0.0
        """The time, in seconds since this object was made."""

    def tick(self) -> float:
        """Go on, and return ``now``."""
        now = self._source()
        self.now += min(now - self._last, _LONGEST_TICK_S)
        self._last = now
        return self.now


class Age:
    """How long something has not changed, on a clock of this process: clocks of two machines are never compared."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._value: Hashable = None
        self._since = clock.now

    def note(self, value: Hashable) -> None:
        """Take what there is now."""
        if value != self._value:
            self._value, self._since = value, self._clock.now

    def restart(self) -> None:
        """Count from now on."""
        self._since = self._clock.now

    @property
    def seconds(self) -> float:
        """Seconds since the value changed."""
        return self._clock.now - self._since
