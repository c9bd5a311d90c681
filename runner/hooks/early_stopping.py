"""EarlyStoppingHook: stops training when a metric no longer improves."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from ...core.errors import ConfigError, counted, suggest
from ...core.registry import HOOKS
from .hook import Hook
from .metric_rules import check_rule, infer_rule, is_better, worst

if TYPE_CHECKING:
    from ..run import Run


@HOOKS.register_module()
class EarlyStoppingHook(Hook):
    """Stops training after the epoch in which a metric has not improved for ``patience`` validations.

    Args:
        monitor: name of the validation metric.
        rule: "greater" or "less" is better; default: by the metric's name.
        min_delta: smallest difference that counts as an improvement.
        strict: raise if the metric is missing; otherwise warn.
        check_finite: stop when the metric is NaN or infinite.
        patience: number of validations without improvement after which training stops; 0 is the same as 1.
        stopping_threshold: stop as soon as the metric is better than this.
    """

    priority = "LOWEST"

    def __init__(
        self,
        monitor: str,
        rule: str | None = None,
        min_delta: float = 0.1,
        strict: bool = False,
        check_finite: bool = True,
        patience: int = 5,
        stopping_threshold: float | None = None,
    ) -> None:
        where = "EarlyStoppingHook"
        if not (min_delta >= 0 and math.isfinite(min_delta)):
            raise ConfigError(
                f"{where}.min_delta: {min_delta} is not allowed, give the smallest difference that counts, 0 or more; rule "
                "says whether greater or less is better"
            )
        if patience < 0:
            raise ConfigError(f"{where}.patience: {patience} is not allowed, give a number of validations")
        self.monitor = monitor
        self.rule = infer_rule(monitor, f"{where}.rule") if rule is None else check_rule(rule, f"{where}.rule")
        self.min_delta = min_delta
        self.strict = strict
        self.check_finite = check_finite
        self.patience = patience
        self.stopping_threshold = stopping_threshold
        self.wait_count = 0
        self.best_score = worst(self.rule)
        self._is_training = False
        self._has_warned = False  # of a missing metric

    def check_metrics(self, runner: Run, names: Collection[str]) -> None:
        """Warn if the metric is missing; with ``strict``, raise ConfigError."""
        if self.monitor not in names:
            message = (
                f'EarlyStoppingHook.monitor: "{self.monitor}" is no metric of the validation'
                f"{suggest(self.monitor, names) or f', there are {sorted(names)}'}"
            )
            if self.strict:
                raise ConfigError(message)
            if not self._has_warned:
                runner.logger.warning(message)
            self._has_warned = True

    def before_train(self, runner: Run) -> None:
        """Compare metrics from now on."""
        self._is_training = True
        if runner.train_loop.by_epoch and self.patience >= runner.max_epochs:
            runner.logger.warning(
                f"EarlyStoppingHook.patience: {self.patience} validations without improvement do not fit into the "
                f"{counted(runner.max_epochs, 'epoch')} of training, it never stops early; give less"
            )

    def after_train(self, runner: Run) -> None:
        """Leave training: a later validation must not count."""
        self._is_training = False

    def on_exception(self, runner: Run, exception: BaseException) -> None:
        """Leave training: a later validation must not count."""
        self._is_training = False

    def after_val_epoch(self, runner: Run, metrics: dict[str, Any] | None = None) -> None:
        """Compare the metric with the best value, and stop training if the rules say so."""
        if not self._is_training:
            return
        metrics = metrics or {}
        self.check_metrics(runner, metrics)
        if self.monitor not in metrics:
            return
        score = float(metrics[self.monitor])
        if not math.isfinite(self.best_score) and (doubt := self._doubt(score)):
            runner.logger.warning(doubt)
        reason = self._reason_to_stop(score)
        if reason:
            runner.train_loop.stop_training = True
            runner.logger.info("Training stops: %s", reason)

    def _doubt(self, score: float) -> str | None:
        """Return a line if ``min_delta`` is large for a metric of this size, as for a share that counts to 1, not 100."""
        is_share = self.rule == "greater" and 0.0 <= score <= 1.0 and self.min_delta >= 0.05
        if not math.isfinite(score) or not (is_share or (self.min_delta >= abs(score) > 0)):
            return None
        what = "a share of 1" if is_share else "no larger than that"
        return (
            f"EarlyStoppingHook.min_delta: {self.min_delta:g} is a large difference for {self.monitor} = {score:.4f}, which is "
            f"{what}; smaller improvements count as none, give less"
        )

    def _reason_to_stop(self, score: float) -> str | None:
        name = f"{self.monitor} = {score:.4f}"
        if self.check_finite and not math.isfinite(score):
            return f"{name} is not finite, the best value was {self.best_score:.4f}"
        if self.stopping_threshold is not None and is_better(self.rule, score, self.stopping_threshold):
            self.best_score = score
            return f"{name} is {self.rule} than stopping_threshold = {self.stopping_threshold}"
        needed = self.best_score + (self.min_delta if self.rule == "greater" else -self.min_delta)
        # A difference of exactly min_delta is an improvement; NaN and infinity (with check_finite=False) never are.
        if (score == needed and math.isfinite(score)) or is_better(self.rule, score, needed):
            self.best_score, self.wait_count = score, 0
            return None
        self.wait_count += 1
        if self.wait_count < self.patience:
            return None
        return (
            f"{self.monitor} has not improved in {self.wait_count} validations, the best value is {self.best_score:.4f}"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the best score and the number of validations since it was reached."""
        return {"best_score": self.best_score, "wait_count": self.wait_count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict``."""
        self.best_score, self.wait_count = float(state["best_score"]), int(state["wait_count"])
