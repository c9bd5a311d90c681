"""The ledger of a job: its seconds over all starts by what they went into, from the events of its work directory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SPENT = "spent"
"""The event that GoodputHook writes."""
KINDS = (
    "useful", "waiting for data", "evaluation", "saving", "start-up", "compiling", "repeated", "lost", "restarting",
    "queue",
)  # fmt: skip
_ADVICE = {
    "waiting for data": "more num_workers, or a faster source",
    "evaluation": "validate less often (train_cfg.val_interval), or on less",
    "saving": "save in the background (checkpoint.async_save=True)",
    "start-up": "keep what is made at start, such as indices of data, and start fewer times",
    "compiling": "keep compiled code (TORCHINDUCTOR_CACHE_DIR on storage that stays)",
    "lost": "record more often (GoodputHook.interval_s)",
    "restarting": "let flextrain run start it again (--max-restarts)",
    "queue": "ask for a longer time limit",
}
_WORTH_SAYING = 1.5
"""Times by which the interval of saves differs from the best before it is said."""


@dataclass
class Start:
    """One start of the processes, as the first of them has recorded it.

    Attributes:
        began, ended: seconds since 1970; ``ended`` is the last time of which something is known.
        first, keeps: numbers of updates: at its beginning, and up to which the newest weights have its work.
        records: (updates, seconds of training) so far, in order.
        spent: seconds by what the hook has recorded.
        queued_until: when a queue gave the job its machines.
        how: the last event of its end: "finished", "failed", "preempted" and so on; empty: it ended without a word.
        saves: checkpoints written.
    """

    began: float
    ended: float
    first: int
    keeps: int
    records: list[tuple[int, float]] = field(default_factory=list)
    spent: Mapping[str, float] = field(default_factory=dict)
    recorded: float = 0.0
    queued_until: float | None = None
    how: str = ""
    saves: int = 0

    def keep(self, updates: int, when: float) -> None:
        """Count the seconds since the last record as training: a checkpoint has what was done in them."""
        if updates > self.records[-1][0]:
            training = self.spent["training"] + when - self.recorded
            self.records.append((updates, training))
            self.spent, self.recorded, self.keeps = {**self.spent, "training": training}, when, updates

    def training_until(self, updates: int) -> float:
        """Seconds of training that it took to come to a number of updates, between the records as between their ends."""
        before = (self.first, 0.0)
        for done, seconds in self.records:
            if done >= updates:
                share = (updates - before[0]) / (done - before[0]) if done > before[0] else 1.0
                return before[1] + share * (seconds - before[1])
            before = (done, seconds)
        return before[1]


@dataclass(frozen=True)
class Ledger:
    """The seconds of a job.

    Attributes:
        starts: in order.
        seconds: by kind; their sum is the time from the beginning of the first start to the last event, without the time
            between a run that has finished and the next start.
    """

    starts: Sequence[Start]
    seconds: Mapping[str, float]

    @property
    def seconds_in_all(self) -> float:
        """The sum."""
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """The share of the time that went into updates which the newest weights have; 0 of nothing."""
        return self.seconds["useful"] / self.seconds_in_all if self.seconds_in_all else 0.0

    @property
    def failures(self) -> int:
        """Starts that ended neither in order nor on request."""
        *earlier, last = self.starts or [None]
        return sum(start.how not in _IN_ORDER for start in earlier) + (last is not None and last.how == "failed")

    def best_interval_s(self) -> float | None:
        """Seconds between saves at which saving and repeating together cost least; None without failures or saves.

        Source: J. W. Young 1974, J. T. Daly 2006: the square root of twice the seconds of a save times the mean time between
        failures.
        """
        saves = sum(start.saves for start in self.starts)
        if not saves or not self.failures:
            return None
        ran = sum(start.ended - start.began for start in self.starts)
        return math.sqrt(2 * self.seconds["saving"] / saves * ran / self.failures)

    def interval_s(self) -> float | None:
        """Mean seconds of training between two saves; None without saves."""
        saves = sum(start.saves for start in self.starts)
        return (self.seconds["useful"] + self.seconds["repeated"]) / saves if saves else None

    def advice(self) -> str:
        """What would gain most, in words; empty if nothing took a hundredth of the time."""
        kind, seconds = max(((k, s) for k, s in self.seconds.items() if k != "useful"), key=lambda one: one[1])
        if seconds < 0.01 * self.seconds_in_all:
            return ""
        said = f"lost most to {_NAMES.get(kind, kind)}, {seconds / self.seconds_in_all:.1%}".replace("%", " %")
        best, interval = self.best_interval_s(), self.interval_s()
        if (
            kind in ("repeated", "saving")
            and best
            and interval
            and not 1 / _WORTH_SAYING < interval / best < _WORTH_SAYING
        ):
            more = "more" if interval > best else "less"
            return f"{said}: save {more} often, every {duration(best)} is best here"
        return f"{said}: {_ADVICE[kind]}" if kind in _ADVICE else said


_NAMES = {
    "repeated": "repeated updates",
    "lost": "what was not recorded",
    "restarting": "restarts",
    "queue": "the queue",
}
_IN_ORDER = ("finished", "preempted")
_ENDS = ("finished", "failed", "preempted", "left", "stalled")


def ledger_of(events: Sequence[Mapping[str, Any]]) -> Ledger:
    """Return the ledger of the events of a work directory, in the order of the file."""
    starts: list[Start] = []
    for event in events:
        kind, when = event["event"], event["time"]
        if kind == SPENT:
            if not starts or starts[-1].began != event["began"]:
                starts.append(Start(event["began"], when, event["iter"], event["iter"]))
            start = starts[-1]
            if start.records and start.records[-1][0] == event["iter"]:  # a save of the same update was counted roughly
                start.records.pop()
            start.records.append((event["iter"], event["spent"]["training"]))
            start.spent, start.recorded, start.queued_until = event["spent"], when, event["queued_until"]
            start.keeps, start.ended = max(start.keeps, event["iter"]), when
        elif starts and kind not in ("launched", "started") and starts[-1].how != "finished":
            start = starts[-1]
            if kind == "restarted" and start.how:
                continue  # of processes that ended without a word it is the first that is known
            if kind == "saved":
                start.saves += 1
                start.keep(event.get("iter", 0), when)
            start.ended = max(start.ended, when)
            start.how = kind if kind in _ENDS else start.how
    for number, start in enumerate(starts):
        for earlier in starts[:number]:
            earlier.keeps = max(min(earlier.keeps, start.first), earlier.first)
    seconds = dict.fromkeys(KINDS, 0.0)
    for before, start in zip([None, *starts], starts, strict=False):
        _add(seconds, start)
        if before is not None and before.how != "finished":
            gap, waits = max(start.began - before.ended, 0.0), start.queued_until
            queue = min(max(waits - before.ended, 0.0), gap) if waits is not None else 0.0
            seconds["queue"] += queue
            seconds["restarting"] += gap - queue
    return Ledger(starts, seconds)


def compiling_s(spent: Mapping[str, float], updates: int) -> float:
    """Seconds that the first update of a start took more than the others."""
    typical = (spent["training"] - spent["first"]) / (updates - 1) if updates > 1 else spent["first"]
    return min(max(spent["first"] - typical, 0.0), spent["training"])


def _add(seconds: dict[str, float], start: Start) -> None:
    spent, last = start.spent, start.records[-1]
    compiling = compiling_s(spent, last[0] - start.first)
    own = spent["training"] - compiling
    share = start.training_until(start.keeps) / spent["training"] if spent["training"] else 0.0
    seconds["compiling"] += compiling
    seconds["useful"] += own * share
    seconds["repeated"] += own * (1 - share)
    seconds["waiting for data"] += spent["waiting"]
    seconds["evaluation"] += spent["evaluation"]
    seconds["saving"] += spent["saving"]
    seconds["start-up"] += spent["start_up"]
    seconds["lost"] += max(start.ended - start.recorded, 0.0)


def summary(ledger: Ledger) -> str:
    """The line at the end of a run."""
    count = len(ledger.starts)
    share = f"{100 * ledger.goodput:.1f} %"
    said = f"Goodput {share} of {duration(ledger.seconds_in_all)} in {count} start{'s' * (count != 1)}"
    return f"{said}; {advice}" if (advice := ledger.advice()) else said


def duration(seconds: float) -> str:
    """Seconds for people: ``2 h 04 min``, ``5 min 10 s``, ``3.2 s``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
