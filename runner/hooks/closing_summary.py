"""ClosingSummary: what LoggerHook writes at the end of training."""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.checkpoint import find_latest, is_checkpoint
from ...core.checkpoint.untrusted import one_line
from ...core.errors import CheckpointError, ConfigError, counted
from ..reporting.progress import samples_per_iteration
from .checkpoint import CheckpointHook
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
        self._best: _Best | None = None  # of the first metric that a validation gives

    def validation_begins(self) -> None:
        """Stop the clock of training."""
        self._validates_since = time.monotonic()

    def validation_ends(self, metrics: Mapping[str, Any] | None) -> None:
        """Start the clock again, and compare the first metric whose name says what is better."""
        self._validated_s += time.monotonic() - self._validates_since
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

    def lines(self) -> Iterator[str]:
        """Yield the lines of the summary."""
        runner = self._runner
        seconds = time.monotonic() - self._begun
        updates, epochs = runner.iter - self._iter, runner.epoch - self._epoch
        if updates:
            took = datetime.timedelta(seconds=round(seconds))
            done = counted(updates, "iteration")
            done = f"{counted(epochs, 'epoch')} ({done})" if runner.train_loop.by_epoch else done
            yield f"Trained {done} in {took}{self._speed(updates, seconds - self._validated_s)}"
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
        data = getattr(self._runner.train_loop, "data", None)  # a loop of one's own may have none
        if data is not None and data.num_samples and data.epoch_length and not data.drop_last:
            return float(data.num_samples / data.epoch_length)
        return samples_per_iteration(self._runner)

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


def _place(best: _Best) -> str:
    if best.checkpoint is None:
        return f', save_best="{best.name}" of CheckpointHook would keep its weights'
    return f", load_from={str(best.checkpoint)!r}" if is_checkpoint(best.checkpoint) else ""


def _rounded(value: float) -> str:
    """Three digits, without an exponent: 4210, 12.3, 0.123."""
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}" if value > 0 else "0"
