"""GoodputHook: writes down, while a run trains, what its seconds went into."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from flextrain import ConfigError, Hook, append_event, read_events

from .ledger import SPENT, compiling_s, ledger_of, summary

_IMPORTED = time.time()
_trainings = 0


class GoodputHook(Hook):
    """Records in ``events.jsonl`` what the seconds of a run went into, and logs the goodput of the job so far.

    The first process writes. An iteration costs one look at the clock; the device is never waited for.

    Args:
        interval_s: seconds between two records; what a killed process did after its last one counts as lost.

    Raises:
        ConfigError: ``interval_s`` is not above 0.
    """

    priority = "LOWEST"  # the time of other hooks belongs to the update

    def __init__(self, interval_s: float = 10.0) -> None:
        if not interval_s > 0:
            raise ConfigError(f"GoodputHook.interval_s: {interval_s} is not allowed, give more than 0")
        self.interval_s = interval_s
        self._due = float("inf")  # nothing is recorded outside of training, and by other processes
        self._first: float | None = None
        self._validates_since: float | None = None
        self._evaluated = 0.0

    def before_train(self, runner: Any) -> None:
        if runner.rank:
            return
        self._began, self._begun = _begins(), time.monotonic()
        self._start_up = time.time() - self._began
        self._first, self._evaluated, self._validates_since = None, 0.0, None
        self._from, self._saved = runner.iter, runner.saving_s
        self._record(runner, runner.iter)
        self._due = 0.0  # the first update is looked at too
        before = ledger_of(read_events(runner.work_dir))
        self._useful, self._wall = before.seconds["useful"], before.seconds_in_all

    def before_val(self, runner: Any) -> None:
        self._validates_since = time.monotonic()

    def after_val(self, runner: Any) -> None:
        if self._validates_since is not None:
            self._evaluated += time.monotonic() - self._validates_since
        self._validates_since = None

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        if (now := time.monotonic()) < self._due:
            return
        if self._first is None:
            self._first = self._training(runner, now)
            self._due = now + self.interval_s
            return
        updates = runner.iter + 1
        spent = self._record(runner, updates)
        useful = self._useful + spent["training"] - compiling_s(spent, updates - self._from)
        runner.message_hub.update_scalar("train/goodput", useful / (self._wall + now - self._begun))

    def after_train(self, runner: Any) -> None:
        if self._due == float("inf"):
            return
        self._record(runner, runner.iter)
        self._due = float("inf")
        runner.logger.info(summary(ledger_of(read_events(runner.work_dir))))

    def on_exception(self, runner: Any, exception: BaseException) -> None:
        if self._due < float("inf"):
            self._record(runner, runner.iter)
            self._due = float("inf")

    def _training(self, runner: Any, now: float) -> float:
        """Seconds of updates: what nothing else is known to have taken."""
        others = self._evaluated + runner.saving_s - self._saved + self._waited(runner)
        return max(now - self._begun - others, 0.0)

    def _waited(self, runner: Any) -> float:
        return next((hook.waited_s for hook in runner.hooks if hasattr(hook, "waited_s")), 0.0)

    def _record(self, runner: Any, updates: int) -> dict[str, float]:
        now = time.monotonic()
        spent = {
            "start_up": self._start_up,
            "first": self._first or 0.0,
            "training": self._training(runner, now),
            "waiting": self._waited(runner),
            "evaluation": self._evaluated,
            "saving": runner.saving_s - self._saved,
        }
        append_event(runner.work_dir, SPENT, iter=updates, began=self._began, queued_until=queued_until(), spent=spent)
        self._due = now + self.interval_s
        return spent


def _begins() -> float:
    """Seconds since 1970 at which a training begins: the first of a process with the process, another one now."""
    global _trainings
    _trainings += 1
    return process_began() if _trainings == 1 else time.time()


def process_began() -> float:
    """Seconds since 1970 at which this process began; where the system does not tell, those of the import of this module."""
    try:
        ticks = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    except (OSError, AttributeError):
        return _IMPORTED
    return booted + ticks / os.sysconf("SC_CLK_TCK")


def queued_until() -> float | None:
    """Seconds since 1970 at which the launcher's queue gave the job its machines; None if it does not tell."""
    given = os.environ.get("SLURM_JOB_START_TIME", "")
    return float(given) if given.isdigit() else None
