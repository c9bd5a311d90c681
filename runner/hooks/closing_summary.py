"""ClosingSummary: what LoggerHook writes at the end of training."""

from __future__ import annotations

import datetime
import math
import shlex
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.checkpoint import find_latest, is_checkpoint
from ...core.checkpoint.untrusted import one_line
from ...core.errors import CheckpointError, ConfigError, counted
from ...core.events import EVENTS, read_events
from ...core.uncaught import told
from ..reporting.log_tables import Table
from ..reporting.progress import samples_per_iteration
from .checkpoint import CheckpointHook
from .iter_timer import IterTimerHook
from .metric_rules import infer_rule, is_better, worst

if TYPE_CHECKING:
    from ..run import Run


@dataclass
class _Best:
    name: str
    score: float
    at: str
    checkpoint: Path | None = None


class ClosingSummary:
    """The figures of a training from its start to its end in this process.

    Args:
        runner: the run, whose training begins now.
    """

    def __init__(self, runner: Run) -> None:
        self._runner = runner
        self._begun, self._iter, self._epoch = time.monotonic(), runner.iter, runner.epoch
        self._validated_s = self._validates_since = 0.0
        self._is_validating = False
        self._saved_s = getattr(runner, "saving_s", 0.0)  # of a training before this one
        self._best: _Best | None = None  # of the first metric that a validation gives

    def validation_begins(self) -> None:
        """Stop the clock of training."""
        self._validates_since = time.monotonic()
        self._is_validating = True

    def validation_ends(self, metrics: Mapping[str, Any] | None) -> None:
        """Start the clock again, and compare the first metric whose name says what is better."""
        self._validated_s += time.monotonic() - self._validates_since
        self._is_validating = False
        for name, value in (metrics or {}).items():
            try:
                rule = infer_rule(name, "")
                score = float(value)
            except (ConfigError, TypeError, ValueError):
                continue
            best = worst(rule) if self._best is None else self._best.score
            if is_better(rule, score, best) and (self._best is None or self._best.name == name):
                self._best = _Best(name, score, self._position())
            return

    @property
    def has_begun(self) -> bool:
        """Whether an update was made."""
        return bool(self._runner.iter > self._iter)

    def last_validation_s(self) -> float:
        """Seconds since the present validation began, or that the one took which has just ended."""
        return time.monotonic() - self._validates_since

    def table(self, ending: str = "") -> Table:
        """Return the table of a run that is over.

        Args:
            ending: what has ended it early; empty: nothing has.
        """
        runner = self._runner
        rows = [("ended", ending or "as configured")]
        rows += [("to go on", self._way_on())] if ending else []
        rows += [("time", self._times())]
        rows += [("starts", text)] if (text := _starts(runner)) else []
        log = Path(runner.log_dir) / f"{runner.timestamp}.log"
        rows += [("log", str(log)), ("events", str(Path(runner.work_dir) / EVENTS))]
        rows += [("checkpoints", str(runner.checkpoint_dir))]
        rows += [("report", f"flextrain report {shlex.quote(runner.work_dir)}")]
        return Table("The run", ("", ""), rows)

    def times(self) -> dict[str, float]:
        """Return the seconds of the training by what they went into; the sum is ``all``."""
        whole = time.monotonic() - self._begun
        now = time.monotonic() - self._validates_since if self._is_validating else 0.0
        timers = [hook.waited_s for hook in self._runner.hooks if isinstance(hook, IterTimerHook)]
        parts = {"validation": self._validated_s + now, "saving": self._runner.saving_s - self._saved_s}
        parts |= {"waiting for data": timers[0]} if timers else {}
        return {"training": max(whole - sum(parts.values()), 0.0), **parts, "all": whole}

    def _way_on(self) -> str:
        try:
            newest = find_latest(self._runner.checkpoint_dir)
        except (CheckpointError, OSError) as error:
            return one_line(error)
        return f"resume=True continues from {newest}" if newest else "no checkpoint was saved yet"

    def _times(self) -> str:
        times = self.times()
        whole = times.pop("all")
        text = ", ".join(f"{name} {_duration(seconds)}" for name, seconds in times.items())
        return f"{_duration(whole)} in all: {text}"

    def lines(self) -> Iterator[str]:
        """Yield the lines of the summary."""
        runner = self._runner
        seconds = time.monotonic() - self._begun
        updates, epochs = runner.iter - self._iter, runner.epoch - self._epoch
        if updates:
            done = counted(updates, "iteration")
            done = f"{counted(epochs, 'epoch')} ({done})" if runner.train_loop.by_epoch else done
            yield f"Trained {done} in {_duration(seconds)}{self._speed(updates, seconds - self._validated_s)}"
        for best in self._bests():
            yield f"Best {best.name}: {best.score:.4f}{best.at}{_place(best)}"
        try:
            newest = find_latest(runner.checkpoint_dir)
        except (CheckpointError, OSError) as error:  # training is done, and the folder's storage must not undo it
            runner.logger.warning(f"The last checkpoint is not known: {one_line(error)}")
            return
        if newest is not None and runner.has_saved(newest):
            yield f"Last checkpoint: {newest}, resume=True continues from it"
        elif newest is not None:
            yield f"This run saved no checkpoint to resume from; {newest} was there before it"

    def _speed(self, updates: int, seconds: float) -> str:
        samples = self._samples_per_iteration()
        if seconds <= 0:
            return ""
        if samples is None:
            return f", {updates / seconds:.3g} iterations/s without validation"
        return f", {_rounded(samples * updates / seconds)} samples/s without validation"

    def _samples_per_iteration(self) -> float | None:
        """Return the mean over an epoch, whose last batch may be smaller; None if the data does not say."""
        whole = samples_per_iteration(self._runner)
        if whole is None:  # a list of batches: its length counts batches
            return None
        data = getattr(self._runner.train_loop, "data", None)  # a loop of one's own may have none
        if data is not None and data.num_samples and data.epoch_length and not data.drop_last:
            return float(data.num_samples / data.epoch_length)
        return whole

    def _bests(self) -> Iterator[_Best]:
        """Yield the best values that a CheckpointHook kept the weights of; if there are none, that of the first metric."""
        own = self._best
        kept = []
        for hook in self._runner.hooks:
            if isinstance(hook, CheckpointHook):
                for name, entry in hook.best_scores.items():
                    at = own.at if own is not None and (own.name, own.score) == (name, entry["score"]) else ""
                    kept.append(_Best(name, entry["score"], at, hook.out_dir(self._runner) / entry["checkpoint"]))
        yield from kept or ([own] if own is not None else [])

    def _position(self) -> str:
        runner = self._runner
        return f" at epoch {runner.epoch}" if runner.train_loop.by_epoch else f" at iteration {runner.iter}"


def how_it_ended(error: BaseException) -> str:
    """Return in a line what has ended a run early."""
    said = str(getattr(error, "what", "") or ("Ctrl-C" if isinstance(error, KeyboardInterrupt) else told(error) or ""))
    saved = str(getattr(error, "saved", ""))
    if not said:
        said = f"{type(error).__name__}: {one_line(error)}" if str(error) else type(error).__name__
    return f"{said}{f'; {saved}' if saved else ''}"


def _duration(seconds: float) -> str:
    """``0:01:00``, below ten seconds ``1.23 s``."""
    return f"{seconds:.2f} s" if seconds < 10 else str(datetime.timedelta(seconds=round(seconds)))


def _starts(run: Run) -> str:
    """How often training has begun since its first update, if that is more than once."""
    begun = [event.get("iter") for event in read_events(run.work_dir) if event["event"] == "started"]
    first = len(begun) - 1 - begun[::-1].index(0) if 0 in begun else 0
    begun, before = begun[first:], f"{counted(first, 'earlier one')}, after which training began anew" if first else ""
    if len(begun) < 2:
        return f"1; {before}" if before else ""
    shown = ["..."] * (len(begun) > 6) + [str(each) for each in begun[1:][-5:]]
    resumed = f"{len(begun)}, resumed after iteration {', '.join(shown)}"
    return f"{resumed}; {before}" if before else resumed


def _place(best: _Best) -> str:
    if best.checkpoint is None:
        return f', save_best="{best.name}" of CheckpointHook would keep its weights'
    return f", load_from={str(best.checkpoint)!r}" if is_checkpoint(best.checkpoint) else ""


def _rounded(value: float) -> str:
    """Three digits, without an exponent: 4210, 12.3, 0.123."""
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}" if value > 0 else "0"
