"""Waiting for what another process or thread does, in place of guessing how long it takes."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], at_most_s: float = 120.0) -> None:
    """Return once ``condition()`` holds; who waits in vain fails, in a worker by the time limit of its group before."""
    deadline = time.monotonic() + at_most_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)
