"""The schedules for any number in the groups; learning_rate.py and momentum.py apply them to the usual two."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ...core.base.errors import ConfigError, suggest
from ...core.base.registry import PARAM_SCHEDULERS
from .base import LRScheduler, MomentumScheduler, ParamScheduler, SchedulerT, logger

# No `from __future__ import annotations` here; base.py gives the reason.


@dataclass(eq=False)
class ConstantParamScheduler(ParamScheduler):
    """Multiplies the value by ``factor`` inside the window; the last step of the window removes the factor.

    A window of one step is its last step, and so changes nothing.

    Args:
        factor: from 0 to 1; default 1/3.
    """

    factor: float = 1.0 / 3

    def _prepare(self) -> None:
        super()._prepare()
        self._require(0 <= self.factor <= 1, "factor", "a number from 0 to 1")

    def _next(self, value: float, base: float) -> float:
        is_last = self.last_step == self.end - self.begin - 1
        if self.last_step == 0:
            return value if is_last else value * self.factor
        if is_last:
            return value / self.factor if self.factor else base
        return value


@dataclass(eq=False)
class LinearParamScheduler(ParamScheduler):
    """Multiplies the value by a factor that changes linearly from ``start_factor`` to ``end_factor``.

    A window of one step has ``end_factor`` at once.

    Args:
        start_factor: the factor at the window's first step, from 0 to 1; default 1/3.
        end_factor: the factor at the window's last step and from then on, from 0 to 1.
    """

    start_factor: float = 1.0 / 3
    end_factor: float = 1.0

    def _prepare(self) -> None:
        super()._prepare()
        self._require(0 <= self.start_factor <= 1, "start_factor", "a number from 0 to 1")
        self._require(0 <= self.end_factor <= 1, "end_factor", "a number from 0 to 1")

    def _next(self, value: float, base: float) -> float:
        length = self.end - self.begin - 1
        if self.last_step == 0:
            return value * (self.start_factor if length else self.end_factor)
        rise = self.end_factor - self.start_factor
        before = length * self.start_factor + (self.last_step - 1) * rise
        if before == 0:  # the value is 0, so the next one can only be computed from the base
            return base * (self.start_factor + rise * self.last_step / length)
        return value * (1 + rise / before)


@dataclass(eq=False)
class StepParamScheduler(ParamScheduler):
    """Multiplies the value by ``gamma`` every ``step_size`` steps.

    Args:
        step_size: steps between two changes: epochs, or updates with ``by_epoch=False``.
        gamma: the factor of each change, 0 or more.
    """

    step_size: int
    gamma: float = 0.1

    _counts: ClassVar[tuple[str, ...]] = ("step_size",)

    def _prepare(self) -> None:
        super()._prepare()
        self._require(self.step_size > 0, "step_size", "a positive int")
        self._require(self.gamma >= 0, "gamma", "a number from 0 on")

    def _next(self, value: float, base: float) -> float:
        return value * self.gamma if self.last_step and self.last_step % self.step_size == 0 else value


@dataclass(eq=False)
class MultiStepParamScheduler(ParamScheduler):
    """Multiplies the value by ``gamma`` at each of ``milestones``, in steps since ``begin``; duplicates count twice.

    Args:
        milestones: the steps of the changes: epochs, or updates with ``by_epoch=False``.
        gamma: the factor of each change, 0 or more.
    """

    milestones: list[int]
    gamma: float = 0.1

    _counts: ClassVar[tuple[str, ...]] = ("milestones",)

    def _prepare(self) -> None:
        super()._prepare()
        self._require(all(milestone >= 0 for milestone in self.milestones), "milestones", "ints from 0 on")
        self._require(self.gamma >= 0, "gamma", "a number from 0 on")

    def _next(self, value: float, base: float) -> float:
        return value * self.gamma ** self.milestones.count(self.last_step)


@dataclass(eq=False)
class ExponentialParamScheduler(ParamScheduler):
    """Multiplies the value by ``gamma`` at every step.

    Args:
        gamma: the factor of each step, 0 or more.
    """

    gamma: float

    def _prepare(self) -> None:
        super()._prepare()
        self._require(self.gamma >= 0, "gamma", "a number from 0 on")

    def _next(self, value: float, base: float) -> float:
        return value * self.gamma if self.last_step else value


@dataclass(eq=False)
class PolyParamScheduler(ParamScheduler):
    """Lowers the value to ``eta_min`` at the window's last step, by (remaining share of the window) ** ``power``.

    A window of one step leaves the value as it is, because a run of one step would train with ``eta_min`` alone.

    Args:
        eta_min: the value at the end.
        power: 1 is a straight line; a larger one falls faster at first.
    """

    eta_min: float = 0.0
    power: float = 1.0

    def _prepare(self) -> None:
        super()._prepare()
        self._require(self.power >= 0, "power", "a number from 0 on")

    def _next(self, value: float, base: float) -> float:
        if self.last_step == 0:
            return value
        left = self.end - self.begin - self.last_step
        return (value - self.eta_min) * math.pow(1 - 1 / left, self.power) + self.eta_min


@dataclass(eq=False)
class CosineAnnealingParamScheduler(ParamScheduler):
    """Moves the value between its initial value and the minimum, half a cosine in ``T_max`` steps (default: window).

    The minimum is ``eta_min`` (default 0), or ``eta_min_ratio`` times each group's initial value. The first step has the
    initial value and the step ``T_max`` after it the minimum; a window of ``T_max`` steps ends one step before that.

    Args:
        T_max: steps from the initial value to the minimum; default: the window's.
        eta_min: the minimum; default 0. Give it or ``eta_min_ratio``.
        eta_min_ratio: the minimum as a share of each group's initial value.
    """

    T_max: int | None = None
    eta_min: float | None = None
    eta_min_ratio: float | None = None

    _counts: ClassVar[tuple[str, ...]] = ("T_max",)

    def _prepare(self) -> None:
        super()._prepare()
        self.T_max = self.end - self.begin if self.T_max is None else self.T_max
        self._require(self.T_max > 0, "T_max", "a positive int")
        _check_minimum(self)

    def _next(self, value: float, base: float) -> float:
        assert self.T_max is not None  # set by _prepare
        step, minimum = self.last_step, _minimum(self, base)
        if step == 0:
            return value
        if (step - 1 - self.T_max) % (2 * self.T_max) == 0:  # the minimum: value - minimum is 0, so no ratio works
            return value + (base - minimum) * (1 - math.cos(math.pi / self.T_max)) / 2
        return _cosine(value, minimum, step, self.T_max)


@dataclass(eq=False)
class CosineRestartParamScheduler(ParamScheduler):
    """Follows a half cosine per entry of ``periods``, each from the initial value times its weight down to the minimum.

    The minimum is ``eta_min`` (default 0), or ``eta_min_ratio`` times each group's initial value. After the last period
    the value does not change.

    Args:
        periods: steps of each half cosine.
        restart_weights: for each period the factor of the initial value at its start.
        eta_min: the minimum; default 0. Give it or ``eta_min_ratio``.
        eta_min_ratio: the minimum as a share of each group's initial value.
    """

    periods: list[int]
    restart_weights: Sequence[float] = (1.0,)
    eta_min: float | None = None
    eta_min_ratio: float | None = None

    _counts: ClassVar[tuple[str, ...]] = ("periods",)

    def _prepare(self) -> None:
        super()._prepare()
        self._require(all(period > 0 for period in self.periods), "periods", "positive ints")
        same = len(self.restart_weights) == len(self.periods)
        self._require(same, "restart_weights", f"one weight for each of the {len(self.periods)} periods")
        _check_minimum(self)

    def _next(self, value: float, base: float) -> float:
        step = self.last_step
        for period, weight in zip(self.periods, self.restart_weights, strict=True):
            if step == 0:
                return base * weight
            if step < period:
                return _cosine(value, _minimum(self, base), step, period)
            step -= period
        return value


@dataclass(eq=False)
class OneCycleParamScheduler(ParamScheduler):
    """Raises the learning rate from ``eta_max / div_factor`` to ``eta_max``, then lowers it to ``eta_max / div_factor /
    final_div_factor``, where it stays.

    Args:
        eta_max: the peak, one for all groups or a list with one per group.
        total_steps: length of the cycle (default: the window).
        pct_start: share of the cycle in which the value rises.
        anneal_strategy: "cos" for half cosines, "linear" for straight lines.
        div_factor: the peak over the start value.
        final_div_factor: the start value over the end value.
        three_phase: return to the start value as fast as it rose, then fall to the end value.
    """

    eta_max: float | list[float]
    total_steps: int | None = None
    pct_start: float = 0.3
    anneal_strategy: Literal["cos", "linear"] = "cos"
    div_factor: float = 25.0
    final_div_factor: float = 1e4
    three_phase: bool = False

    _counts: ClassVar[tuple[str, ...]] = ("total_steps",)

    def _prepare(self) -> None:
        super()._prepare()
        self._require(self.param_name == "lr", "param_name", '"lr", the only one that makes a cycle')
        self.total_steps = self.end - self.begin if self.total_steps is None else self.total_steps
        self._require(self.total_steps > 0, "total_steps", "a positive int")
        self._require(0 <= self.pct_start <= 1, "pct_start", "a number from 0 to 1")
        self._require(self.anneal_strategy in ("cos", "linear"), "anneal_strategy", '"cos" or "linear"')
        self._require(self.div_factor > 0, "div_factor", "a positive number")
        self._require(self.final_div_factor > 0, "final_div_factor", "a positive number")
        groups = self.optimizer.param_groups
        peaks = self.eta_max if isinstance(self.eta_max, (list, tuple)) else [self.eta_max] * len(groups)
        self._require(len(peaks) == len(groups), "eta_max", f"a number, or one for each of the {len(groups)} groups")
        self._require(all(peak > 0 for peak in peaks), "eta_max", "a positive number")
        rates = sorted({float(group["lr"]) for group in groups})
        if peaks is not self.eta_max and len(rates) > 1:
            logger.warning(
                f"{self._where('eta_max')}: {self.eta_max} is the peak of all {len(groups)} groups, so their learning rates, {rates[0]:g} to "
                f"{rates[-1]:g} by paramwise_cfg or lr_mult, have no effect; give a list with a peak for each group"
            )
        if self.last_step == -1:
            for group, peak in zip(groups, peaks, strict=True):
                group["initial_lr"] = peak / self.div_factor

    def _next(self, value: float, base: float) -> float:
        assert self.total_steps is not None  # set by _prepare
        last, rise = self.total_steps - 1, self.pct_start * self.total_steps - 1
        peak, bottom = base * self.div_factor, base / self.final_div_factor
        if self.three_phase:
            phases = [(0, rise, base, peak), (rise, 2 * rise, peak, base), (2 * rise, last, base, bottom)]
        else:
            phases = [(0, rise, base, peak), (rise, last, peak, bottom)]
        begin, end, start, goal = next((phase for phase in phases if self.last_step <= phase[1]), phases[-1])
        share = min((self.last_step - begin) / (end - begin), 1) if end > begin else 1
        if self.anneal_strategy == "linear":
            return start + (goal - start) * share
        return goal + (start - goal) / 2 * (1 + math.cos(math.pi * share))


_Cosine = CosineAnnealingParamScheduler | CosineRestartParamScheduler


def _check_minimum(scheduler: _Cosine) -> None:
    if scheduler.eta_min is not None and scheduler.eta_min_ratio is not None:
        raise ConfigError(f"{type(scheduler).__name__}: eta_min and eta_min_ratio are both given, choose one")


def _minimum(scheduler: _Cosine, base: float) -> float:
    return scheduler.eta_min or 0.0 if scheduler.eta_min_ratio is None else scheduler.eta_min_ratio * base


def _cosine(value: float, minimum: float, step: int, period: int) -> float:
    """Return the next value of a half cosine, computed from the present value, which others may have changed."""
    here, before = (1 + math.cos(math.pi * at / period) for at in (step, step - 1))
    return here / before * (value - minimum) + minimum


# ReduceOnPlateau: reduce a value when a validation metric stops improving.


# No `from __future__ import annotations` here; base.py gives the reason.


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
            values = self.get_values()  # read before one is written, because groups may share a tensor
            for group, value, minimum in zip(self.optimizer.param_groups, values, self._minima(), strict=True):
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


# Learning-rate schedulers: ``ConstantLR(optimizer, ...)`` and so on.
#
# Behaviour and arguments are documented at the ``...ParamScheduler`` of the same name.


@dataclass(eq=False)
class ConstantLR(LRScheduler, ConstantParamScheduler): ...


@dataclass(eq=False)
class LinearLR(LRScheduler, LinearParamScheduler): ...


@dataclass(eq=False)
class StepLR(LRScheduler, StepParamScheduler): ...


@dataclass(eq=False)
class MultiStepLR(LRScheduler, MultiStepParamScheduler): ...


@dataclass(eq=False)
class ExponentialLR(LRScheduler, ExponentialParamScheduler): ...


@dataclass(eq=False)
class PolyLR(LRScheduler, PolyParamScheduler): ...


@dataclass(eq=False)
class CosineAnnealingLR(LRScheduler, CosineAnnealingParamScheduler): ...


@dataclass(eq=False)
class CosineRestartLR(LRScheduler, CosineRestartParamScheduler): ...


@dataclass(eq=False)
class OneCycleLR(LRScheduler, OneCycleParamScheduler): ...


@dataclass(eq=False)
class ReduceOnPlateauLR(LRScheduler, ReduceOnPlateauParamScheduler): ...


# Momentum schedulers (SGD's momentum, or Adam's first beta): ``ConstantMomentum(optimizer, ...)`` and so on.
#
# Behaviour and arguments are documented at the ``...ParamScheduler`` of the same name.


@dataclass(eq=False)
class ConstantMomentum(MomentumScheduler, ConstantParamScheduler): ...


@dataclass(eq=False)
class LinearMomentum(MomentumScheduler, LinearParamScheduler): ...


@dataclass(eq=False)
class StepMomentum(MomentumScheduler, StepParamScheduler): ...


@dataclass(eq=False)
class MultiStepMomentum(MomentumScheduler, MultiStepParamScheduler): ...


@dataclass(eq=False)
class ExponentialMomentum(MomentumScheduler, ExponentialParamScheduler): ...


@dataclass(eq=False)
class PolyMomentum(MomentumScheduler, PolyParamScheduler): ...


@dataclass(eq=False)
class CosineAnnealingMomentum(MomentumScheduler, CosineAnnealingParamScheduler): ...


@dataclass(eq=False)
class CosineRestartMomentum(MomentumScheduler, CosineRestartParamScheduler): ...


@dataclass(eq=False)
class ReduceOnPlateauMomentum(MomentumScheduler, ReduceOnPlateauParamScheduler): ...


for _kind in [each for each in globals().values() if isinstance(each, type) and each.__module__ == __name__]:
    PARAM_SCHEDULERS.register_module(module=_kind)
