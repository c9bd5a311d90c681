"""Waiting for what another process does, in place of guessing how long it takes."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object]) -> None:
    """Return once ``condition()`` holds; who waits in vain is ended by the time limit of the worker group."""
    while not condition():
        time.sleep(0.005)
