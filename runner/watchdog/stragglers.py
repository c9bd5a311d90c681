"""Stragglers: a process that takes far more time than the others for what no other process waits in."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence

LEAST_S = 60.0
"""Seconds that are compared at a time."""
LEAST_SHARE = 0.2
"""A straggler spends this share of all the time more than the median does."""
LEAST_RATIO = 1.5
"""It takes this many times as long as the median."""
_IN_A_ROW = 2
_LIBRARY = __name__.partition(".")[0]
_HOOKS = (f"{_LIBRARY}.runner.loops.", f"{_LIBRARY}.runner.hooks.dispatch")

PARTS = ("data loading", "hooks")
"""What is compared: both come before or after the collectives of an update, in which the processes wait for each other.
The time of a whole update is the same for all, because they wait."""


def part_of(thread: int) -> int | None:
    """The index in PARTS of what ``thread`` of this process is doing; None for anything else."""
    frame = sys._current_frames().get(thread)
    is_innermost = True
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name.startswith("torch.distributed"):  # a hook that waits for other processes
            return None
        if name.startswith(f"{_LIBRARY}."):
            if name.startswith(f"{_LIBRARY}.runner.data."):
                return 0
            return 1 if name.startswith(_HOOKS) and not is_innermost else None
        is_innermost, frame = False, frame.f_back
    return None


Samples = tuple[int, ...]
"""How often a process was looked at, and how often it was then in each of PARTS."""


class Stragglers:
    """Compares what the processes were doing when they were looked at, five times a second; for the one that gathers.

    Because of the thresholds a warning means that the run would be faster by about a sixth or more without the
    difference. It comes once for a rank and a part, after two minutes.
    """

    def __init__(self) -> None:
        self._since = 0.0
        self._before: Sequence[Samples] = ()
        self._suspects: dict[tuple[int, int], int] = {}

    def compare(self, now: float, samples: Sequence[Samples]) -> list[tuple[int, str]]:
        """Return the stragglers that are new, each with what to say of it.

        Args:
            now: the time on this process's clock, in seconds.
            samples: of all processes.
        """
        if now - self._since < LEAST_S and self._before:
            return []
        before, self._before, self._since = self._before, samples, now
        if len(before) != len(samples):
            return []
        new = [tuple(b - a for a, b in zip(old, own, strict=True)) for old, own in zip(before, samples, strict=True)]
        if min(total for total, *_ in new) < LEAST_S:  # a process that was hardly looked at, or has begun a new run
            self._suspects.clear()
            return []
        return [found for part in range(len(PARTS)) for found in self._of_part(part, new)]

    def _of_part(self, part: int, new: Sequence[Samples]) -> list[tuple[int, str]]:
        shares = [own[1 + part] / own[0] for own in new]
        usual = statistics.median_low(shares)
        found = []
        for rank, share in enumerate(shares):
            key = rank, part
            is_far = share - usual > LEAST_SHARE and share > LEAST_RATIO * usual
            if not is_far and self._suspects.get(key, 0) < _IN_A_ROW:
                self._suspects.pop(key, None)
                continue
            self._suspects[key] = self._suspects.get(key, 0) + is_far
            if is_far and self._suspects[key] == _IN_A_ROW:
                found.append((rank, _said(part, share, usual)))
        return found


def _said(part: int, share: float, usual: float) -> str:
    times = f"{share / usual:.1f} times the median" if usual > 0.05 else f"{share:.0%} of the time, others hardly any,"
    return (
        f"takes {times} in {PARTS[part]} ({share:.0%} of the time, {usual:.0%} in the median): the others wait for it"
    )


def empty() -> Samples:
    """The samples of a process that nobody has looked at yet."""
    return (0,) * (1 + len(PARTS))


def with_one_more(samples: Samples, part: int | None) -> Samples:
    """The samples with another look at the process, which was in ``part``."""
    return (samples[0] + 1, *(count + (index == part) for index, count in enumerate(samples[1:])))
