"""Whole schedules by one name, such as "cosine": windows of the schedulers that the configuration could list."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from ...core.config import check_call
from ...core.errors import ConfigError
from ...core.registry import PARAM_SCHEDULERS

Parts = list[dict[str, Any]]


class NamedSchedule:
    """A schedule that ends with training, in updates, whichever way the run counts.

    Numbers of updates are given as an int, or as a float from 0 to 1: a share of the run, rounded up.

    Args:
        name: one of NAMES.
        options: of the function of this name, without ``run``.
        where: the configuration key, for messages.

    Raises:
        ConfigError: an unknown option, or one out of range.
    """

    def __init__(self, name: str, options: Mapping[str, Any], where: str) -> None:
        self._make, self._options, self._where = NAMES[name], dict(options), where
        check_call(self._make, self._options, where, ("run",))
        for key, value in self._options.items():
            if key in ("warmup", "decay") and not _is_share_or_count(value):
                raise ConfigError(
                    f"{where}.{key}: {value!r} is not allowed, give a number of updates, or a share of them from 0.0 to 1.0"
                )
            if key in ("min_ratio", "pct_start") and not 0 <= value <= 1:
                raise ConfigError(f"{where}.{key}: {value!r} is not allowed, give a number from 0 to 1")

    def parts(self, updates: int | None, rates: Sequence[float]) -> Parts:
        """Return the configurations of the schedulers, in order.

        Args:
            updates: of the whole run.
            rates: the optimizer's learning rates, one for each group.

        Raises:
            ConfigError: the run has no known length, or the parts do not fit into it.
        """
        if updates is None:
            raise ConfigError(f"{self._where}: needs the number of updates of the run, give max_iters")
        counts = {
            key: math.ceil(round(value * updates, 6)) if isinstance(value, float) else value
            for key, value in self._options.items()
            if key in ("warmup", "decay")
        }
        defaults = {key: p.default for key, p in inspect.signature(self._make).parameters.items() if key in _COUNTED}
        used = {key: counts.get(key, math.ceil(round(value * updates, 6))) for key, value in defaults.items()}
        if sum(used.values()) > updates:
            said = " and ".join(f"{key} of {count}" for key, count in used.items())
            raise ConfigError(f"{self._where}: {said} updates do not fit into the {updates} of the run; give less")
        return self._make(run=(updates, list(rates)), **{**self._options, **used})


Run = tuple[int, list[float]]
"""The updates of the run, and the learning rate of each group."""
_COUNTED = ("warmup", "decay")


def _is_share_or_count(value: Any) -> bool:
    return value >= 0 and not isinstance(value, bool) and (isinstance(value, int) or value <= 1)


def cosine(run: Run, warmup: int | float = 0, min_ratio: float = 0.0) -> Parts:
    """A warm-up, then half a cosine down to ``min_ratio`` times the rate, which is reached after the last update."""
    return [*_rise(warmup), *_fall("cosine", warmup, run, min_ratio)]


def linear(run: Run, warmup: int | float = 0, min_ratio: float = 0.0) -> Parts:
    """A warm-up, then a straight line down to ``min_ratio`` times the rate, which is reached after the last update."""
    return [*_rise(warmup), *_fall("linear", warmup, run, min_ratio)]


def constant(run: Run, warmup: int | float = 0) -> Parts:
    """A warm-up, then the optimizer's rate."""
    return _rise(warmup)


def wsd(
    run: Run,
    warmup: int | float = 0,
    decay: int | float = 0.2,
    min_ratio: float = 0.0,
    shape: Literal["linear", "cosine"] = "linear",
) -> Parts:
    """A warm-up, the optimizer's rate, and in the last ``decay`` updates a fall to ``min_ratio`` times the rate."""
    return [*_rise(warmup), *_fall(shape, run[0] - int(decay), run, min_ratio)]


def one_cycle(
    run: Run,
    pct_start: float = 0.3,
    anneal_strategy: Literal["cos", "linear"] = "cos",
    div_factor: float = 25.0,
    final_div_factor: float = 1e4,
    three_phase: bool = False,
) -> Parts:
    """torch's OneCycleLR over the run, with the optimizer's rate as its peak."""
    return [
        dict(
            type="OneCycleLR",
            eta_max=run[1],
            by_epoch=False,
            end=run[0],
            pct_start=pct_start,
            anneal_strategy=anneal_strategy,
            div_factor=div_factor,
            final_div_factor=final_div_factor,
            three_phase=three_phase,
        )
    ]


NAMES: dict[str, Callable[..., Parts]] = {each.__name__: each for each in (cosine, linear, constant, wsd, one_cycle)}


def named_schedule(cfg: Any, where: str) -> NamedSchedule | None:
    """Return the schedule that a configuration names; None for another. A scheduler registered by the user comes first."""
    name = cfg.get("type") if isinstance(cfg, Mapping) else cfg
    if not isinstance(name, str) or name not in NAMES or name in PARAM_SCHEDULERS:
        return None
    options = {key: value for key, value in cfg.items() if key != "type"} if isinstance(cfg, Mapping) else {}
    return NamedSchedule(name, options, where)


def _rise(warmup: int | float) -> Parts:
    """From 0 in the first update to the whole rate in the one after ``warmup`` updates."""
    if not warmup:
        return []
    return [dict(type="LinearLR", by_epoch=False, start_factor=0.0, end=int(warmup) + 1)]


def _fall(shape: str, begin: int | float, run: Run, min_ratio: float) -> Parts:
    """From the whole rate in update ``begin`` to ``min_ratio`` times the rate after the last one."""
    begin, end = int(begin), run[0]
    if begin >= end:
        return []
    if shape == "cosine":
        return [dict(type="CosineAnnealingLR", by_epoch=False, begin=begin, end=end, eta_min_ratio=min_ratio)]
    return [dict(type="LinearLR", by_epoch=False, begin=begin, end=end + 1, start_factor=1.0, end_factor=min_ratio)]
