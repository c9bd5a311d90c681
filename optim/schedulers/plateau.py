"""ReduceOnPlateau: reduce a value when a validation metric stops improving."""

# No `from __future__ import annotations` here; base.py gives the reason.

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ...core.errors import ConfigError, suggest
from ...core.registry import PARAM_SCHEDULERS
from .base import ParamScheduler, SchedulerT


@PARAM_SCHEDULERS.register_module()
@dataclass(eq=False)
class ReduceOnPlateauParamScheduler(ParamScheduler):
    """Multiplies the value by ``factor`` when ``monitor`` has not improved for more than ``patience`` validations.

    Args:
        monitor: name of the metric.
        rule: whether "less" or "greater" is better.
        factor: factor of one reduction.
        patience: validations without improvement that cause no reduction.
        threshold: smallest difference that counts as an improvement.
        threshold_rule: threshold relative to the best value ("rel") or absolute ("abs").
        cooldown: validations after a reduction that are not counted.
        min_value: lower bound, one for all groups or a list with one per group.
        eps: a reduction must be larger than this to be made.
    """

    monitor: str = "loss"
    rule: Literal["less", "greater"] = "less"
    factor: float = 0.1
    patience: int = 10
    threshold: float = 1e-4
    threshold_rule: Literal["rel", "abs"] = "rel"
    cooldown: int = 0
    min_value: float | list[float] = 0.0
    eps: float = 1e-8

    need_val_args: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.best: float | None = None
        self.num_bad_epochs = 0
        self.cooldown_counter = 0
        super().__post_init__()

    @classmethod
    def build_iter_from_epoch(cls: type[SchedulerT], *args: Any, **options: Any) -> SchedulerT:
        """Raise ConfigError: the scheduler counts validations, not iterations."""
        raise ConfigError(f"{cls.__name__}.convert_to_iter_based: True is not allowed, it steps once per validation")

    def step(self, metrics: Mapping[str, Any] | None = None) -> None:
        """Count a training epoch if ``metrics`` is None, else compare the metrics of the validation after it.

        Raises:
            ConfigError: the metrics do not contain ``monitor``.
        """
        if metrics is None:
            self._global_step += 1
            return
        if not isinstance(metrics, Mapping):
            raise ConfigError(
                f"{type(self).__name__}.step: {type(metrics).__name__} is not allowed, give a dict of metrics"
            )
        if self.begin <= self._global_step < self.end:
            self.last_step += 1
            self._judge(self._metric(metrics))
        self._last_value = self._values()

    def _judge(self, metric: float) -> None:
        if self._is_better(metric):
            self.best, self.num_bad_epochs = metric, 0
        else:
            self.num_bad_epochs += 1
        if self.cooldown_counter:
            self.cooldown_counter -= 1
            self.num_bad_epochs = 0
        if self.num_bad_epochs > self.patience:
            for group, minimum in zip(self.optimizer.param_groups, self._minima(), strict=True):
                value = float(self._read(group))
                reduced = max(value * self.factor, minimum)
                if value - reduced > self.eps:
                    self._write(group, reduced)
            self.num_bad_epochs, self.cooldown_counter = 0, self.cooldown

    def _is_better(self, metric: float) -> bool:
        if not math.isfinite(metric):
            return False
        if self.best is None:
            return True
        margin = self.threshold * (self.best if self.threshold_rule == "rel" else 1.0)
        return metric < self.best - margin if self.rule == "less" else metric > self.best + margin

    def check_metrics(self, names: Collection[str]) -> None:
        """Raise ConfigError if ``monitor`` is missing."""
        if self.monitor not in names:
            hint = suggest(self.monitor, names) or f", choose from {', '.join(names)}"
            raise ConfigError(f'{self._where("monitor")}: "{self.monitor}" is no metric of the validation{hint}')

    def _metric(self, metrics: Mapping[str, Any]) -> float:
        self.check_metrics(metrics)
        return float(metrics[self.monitor])

    def _minima(self) -> list[float]:
        if isinstance(self.min_value, (list, tuple)):
            return list(self.min_value)
        return [self.min_value] * len(self.optimizer.param_groups)

    def _prepare(self) -> None:
        super()._prepare()
        self._require(self.by_epoch, "by_epoch", "True, it steps once per validation")
        self._require(self.rule in ("less", "greater"), "rule", '"less" or "greater"')
        self._require(self.threshold_rule in ("rel", "abs"), "threshold_rule", '"rel" or "abs"')
        self._require(0 <= self.factor < 1, "factor", "a number from 0 to below 1")
        self._require(self.patience >= 0, "patience", "an int from 0 on")
        self._require(self.cooldown >= 0, "cooldown", "an int from 0 on")
        self._require(self.threshold >= 0, "threshold", "a number from 0 on")
        groups = len(self.optimizer.param_groups)
        self._require(len(self._minima()) == groups, "min_value", f"a number, or one for each of the {groups} groups")
