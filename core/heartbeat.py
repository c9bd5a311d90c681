"""Signs of life of long work, by which the watchdog tells it from a hang."""

from __future__ import annotations

_count = 0


def heartbeat() -> None:
    """Tell the watchdog that this process is getting on; from any thread, as often as one likes.

    Iterations, validation batches and parts of checkpoints count by themselves. Call this in work of your own, such as a
    hook, that takes longer than ``stall_s`` (see ``env_cfg.watchdog``), each time that some of it is done.
    """
    global _count
    _count += 1  # two threads may lose one of two increments; the watchdog asks only whether the number changes


def heartbeats() -> int:
    """How often ``heartbeat`` was called in this process."""
    return _count
