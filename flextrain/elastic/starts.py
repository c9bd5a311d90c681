"""History: the starts of a job, what each gained, and whether another one makes sense."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

STALLED = 75
"""The exit status of processes that the watchdog ended."""


@dataclass(frozen=True)
class Fault:
    """Why a start ended.

    Attributes:
        reason: in words, such as "rank 1 failed: ValueError: ...".
        status: the exit status of the process that failed; 128 + its number after a signal.
        samples: indices of the batch that was being read; None if they are not known.
        is_preemption: whether the run ended itself after a signal or a request to stop, with any status.
        is_killed: whether a process of another machine ended without a word, with a status that is not known here.
        is_asked: whether that was by ``max_time`` or ``request_stop``, after which nobody wants another start.
    """

    reason: str
    status: int = 1
    samples: Sequence[int] | None = None
    is_preemption: bool = False
    is_killed: bool = False
    is_asked: bool = False

    @property
    def is_from_outside(self) -> bool:
        """Whether a signal ended the process, or a watchdog that stalled ones: what is trained on may be innocent."""
        return self.is_preemption or self.is_killed or self.status > 128 or self.status == STALLED


@dataclass
class Start:
    """The time from one start of the processes to their end.

    Attributes:
        number: 0 for the first.
        processes, machines: how many of each.
        began: the iteration from which training went on; None if it was not reached.
        iter: updates done in the end, counted from the beginning of training.
        fault: why it ended; None if it ended well, goes on, or if no process of this machine failed.
        elsewhere: why it ended if no process of this machine failed, in words; see failure_elsewhere.
    """

    number: int
    processes: int
    machines: int
    began: int | None = None
    iter: int = 0
    fault: Fault | None = None
    elsewhere: str = ""

    @property
    def reason(self) -> str:
        """Why it ended, in words."""
        return self.elsewhere if self.fault is None else self.fault.reason

    @property
    def gained_nothing(self) -> bool:
        """Whether it made no update."""
        return self.began is None or self.iter <= self.began


@dataclass
class History:
    """The starts of a job, and the time in which it did not come further.

    Attributes:
        starts: in their order.
        lost_s: seconds from the last update before a failure until training is further than that, over all failures.
    """

    starts: list[Start] = field(default_factory=list)
    lost_s: float = 0.0
    _furthest: int = 0
    _reached_at: float | None = None
    _is_behind: bool = False

    @property
    def current(self) -> Start:
        """The start that is under way."""
        return self.starts[-1]

    def begin(self, processes: int, machines: int, number: int) -> None:
        """Note that processes start; ``number`` is how many starts the job had before, which began elsewhere perhaps."""
        self.starts.append(Start(number, processes, machines))
        self._is_behind = len(self.starts) > 1

    def saw(self, began: int | None, done: int, now: float) -> None:
        """Note the progress at the time ``now``, in seconds."""
        start = self.current
        if began is None:
            return
        start.began, start.iter = began, done
        if done > self._furthest or self._reached_at is None:
            if self._is_behind and self._reached_at is not None:
                self.lost_s += now - self._reached_at
            self._is_behind = False
            self._furthest, self._reached_at = done, now

    def end(self, now: float) -> None:
        """Note that there will be no further start."""
        if self._is_behind and self._reached_at is not None:
            self.lost_s += now - self._reached_at
            self._is_behind = False

    @property
    def repeated(self) -> int:
        """Updates that were done before and had to be done again."""
        return sum(
            max(0, before.iter - after.began)
            for before, after in zip(self.starts, self.starts[1:], strict=False)
            if after.began is not None
        )

    def futile(self) -> str | None:
        """Why another start would end like the last one; None if it may not.

        It would if the last restart made no update, or if two starts in a row ended in the same iteration. What comes
        from outside, a signal or a stall, may hit twice by chance: then it takes two restarts, or three starts.
        A run that was asked to stop is not started again.
        """
        if self.starts and (fault := self.current.fault) is not None and fault.is_asked:
            return "nobody wants it"
        if len(self.starts) < 2 or any(
            start.fault is None for start in self.starts[-2:]
        ):  # machines came or went, or one of them failed that counts its own failures
            return None
        last = self.starts[-1]
        assert last.fault is not None
        times = 3 if last.fault.is_from_outside else 2
        recent = self.starts[-times:]
        if len(recent) < times:
            return None
        often = "twice" if times == 2 else "three times"
        if all(start.began is None for start in recent):
            return f"training was not reached {often}"
        if last.began is not None and all(start.iter == last.iter for start in recent):
            return f"iteration {last.iter + 1} failed {often}{_of_samples(*(start.fault for start in recent))}"
        if all(start.gained_nothing for start in recent[1:]):
            restarts = "the restart" if times == 2 else "two restarts"
            where = "training was not reached" if last.began is None else f"iteration {last.iter + 1} failed at once"
            return f"{restarts} made no update, {where}"
        return None


def _of_samples(*faults: Fault | None) -> str:
    found = next((fault.samples for fault in faults if fault is not None and fault.samples), None)
    return f", with samples {', '.join(map(str, found))} of the dataset" if found else ""


def failure_of(exits: Mapping[int, int], events: Sequence[Mapping[str, Any]]) -> Fault:
    """Find the reason why processes ended.

    Args:
        exits: exit status by rank, negative after a signal, in the order in which the processes ended; not empty.
        events: the lines that they have left in ``events.jsonl``.
    """
    # The process that was killed has left none. Others say that they lost it, or that it has ended without a word, which
    # its exit status tells better.
    told = [
        event
        for event in events
        if event.get("event") in ("failed", "stalled", "preempted")
        and not (event.get("killed") and event.get("rank") in exits)
    ]
    rank, code = next(iter(exits.items()))
    status = code if code > 0 else 128 - code
    if all(event.get("follows") for event in told):
        killed = {rank: code for rank, code in exits.items() if code < 0 and code != -_TERM}
        speakers = {event.get("rank") for event in told}
        silent = {rank: code for rank, code in exits.items() if rank not in speakers}
        # A back end may abort processes whose peer has failed.
        for found in ({rank: code for rank, code in killed.items() if rank in silent}, killed, silent):
            if found:
                return _ended(*next(iter(found.items())))
    first = min(told, key=lambda event: (event.get("follows", False), event["time"]))
    rank = int(first.get("rank", rank))
    if exits.get(rank, 0) > 0:
        status = exits[rank]
    if first.get("follows"):
        return Fault(f"rank {rank} lost another process", status)
    if first["event"] == "preempted":
        who, why = first.get("on_rank", rank), first.get("by", "by a signal")
        if str(why).startswith(("SIG", "by a signal")):
            return Fault(f"rank {who} was preempted, {why}", status, is_preemption=True)
        return Fault(f"the run was stopped, {why}", status, is_preemption=True, is_asked=True)
    said = first.get("reason")
    if first.get("killed"):
        return Fault(str(said), status, is_killed=True)
    return Fault(f"rank {rank} {first['event']}{f': {said}' if said else ''}", status, first.get("samples"))


def failure_elsewhere(before: int, now: int, events: Sequence[Mapping[str, Any]]) -> str:
    """Say why the processes of a machine were started again though none of them failed.

    Args:
        before, now: numbers of machines.
        events: as for failure_of.
    """
    if before != now:
        return "the number of machines changed"
    told = [event for event in events if event.get("event") in ("failed", "stalled", "preempted")]
    if all(event.get("follows") for event in told):
        return "another machine started again"
    return failure_of({_NO_RANK: 1}, told).reason


def _ended(rank: int, code: int) -> Fault:
    how = f"was ended by {signal_name(-code)}" if code < 0 else f"ended with status {code}{_KNOWN.get(code, '')}"
    return Fault(f"rank {rank} {how}", code if code > 0 else 128 - code)


def signal_name(number: int) -> str:
    """The name of a signal; its number if it has none."""
    return signal.Signals(number).name if number in [int(one) for one in signal.Signals] else f"signal {number}"


_NO_RANK = -1
_TERM = int(signal.SIGTERM)
_KNOWN = {STALLED: " (a stall)", 143: " (preempted)"}
