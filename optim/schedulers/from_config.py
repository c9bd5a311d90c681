"""Build parameter schedulers from a configuration."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch.optim import lr_scheduler

from ...core.base.config import check_call, refuse_foreign
from ...core.base.errors import ConfigError
from ...core.base.registry import PARAM_SCHEDULERS
from .base import HasParamGroups, ParamScheduler
from .torch_adapter import TorchScheduler, torch_scheduler

# Whole schedules by one name, such as "cosine": windows of the schedulers that the configuration could list.


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
    """torch's OneCycleLR over the run, with the optimizer's rate as its peak; momentum stays as it is."""
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


def build_param_schedulers(
    cfgs: Any,
    optimizer: HasParamGroups,
    *,
    epoch_length: int | None,
    max_epochs: int | None = None,
    max_iters: int | None = None,
    where: str = "param_scheduler",
) -> list[ParamScheduler]:
    """Return the schedulers that ``cfgs`` describes, in order, for ``optimizer``.

    Args:
        cfgs: None, one scheduler or a list: ``dict(type=..., **arguments)``, a name, a class, or an instance, which is
            returned unchanged. A name of by_name.NAMES, such as "cosine", stands for all that it consists of. ``convert_to_iter_based=True`` replaces epochs by iterations.
        optimizer: an OptimWrapper or a torch optimizer.
        epoch_length: iterations per epoch, needed for ``convert_to_iter_based``.
        max_epochs: default ``end`` of epoch-based schedulers.
        max_iters: default ``end`` of iteration-based schedulers; without ``max_epochs``, also of those that are converted.
        where: the configuration key, for messages.

    Raises:
        ConfigError: unknown type, or unknown, missing, wrongly typed or out-of-range arguments.
    """
    schedulers = []
    for cfg, key in _each(cfgs, where):
        if isinstance(cfg, ParamScheduler):
            schedulers.append(cfg)
            continue
        if (named := named_schedule(cfg, key)) is not None:
            if max_iters is None and max_epochs is not None and epoch_length is not None:
                max_iters = max_epochs * epoch_length
            rates = [float(group["lr"]) for group in optimizer.param_groups]
            parts = named.parts(max_iters, rates)
            schedulers += build_param_schedulers(parts, optimizer, epoch_length=None, max_iters=max_iters, where=key)
            continue
        kind, options, convert = _resolve(cfg, key)
        end: float | None = max_epochs if options.get("by_epoch", True) else max_iters
        if convert and end is None and max_iters is not None and epoch_length:
            end = (max_iters + 1e-3) / epoch_length  # the conversion rounds down, to max_iters
        _set_end(options, end, key)
        if convert and epoch_length is None:
            raise ConfigError(f"{key}.convert_to_iter_based: needs the length of an epoch, the data loader has none")
        try:
            _check_options(kind, options, convert, key)
            if convert:
                schedulers.append(kind.build_iter_from_epoch(optimizer=optimizer, epoch_length=epoch_length, **options))
            else:
                schedulers.append(kind(optimizer=optimizer, **options))
        except ConfigError as error:
            raise _located(error, key) from error.__cause__
    return schedulers


@dataclass(frozen=True)
class CheckedScheduler:
    """The facts about a scheduler that are known before the optimizer exists.

    Attributes:
        where: its configuration key.
        by_epoch: whether its steps are epochs.
        needs_metrics: whether it steps with the metrics of a validation.
    """

    where: str
    by_epoch: bool
    needs_metrics: bool


def check_param_schedulers(
    cfgs: Any, where: str = "param_scheduler", *, max_epochs: int | None = None
) -> list[CheckedScheduler]:
    """Check types and arguments before the optimizer exists; return one CheckedScheduler each.

    Args:
        cfgs, max_epochs, where: see `build_param_schedulers`.

    Raises:
        ConfigError: as `build_param_schedulers`, except for errors that depend on the optimizer, and for the ranges of
            torch's own schedulers, which only their constructors check.
    """
    checked = []
    for cfg, key in _each(cfgs, where):
        if isinstance(cfg, ParamScheduler):
            checked.append(CheckedScheduler(key, cfg.by_epoch, cfg.need_val_args))
            continue
        if named_schedule(cfg, key) is not None:
            checked.append(CheckedScheduler(key, by_epoch=False, needs_metrics=False))
            continue
        kind, options, convert = _resolve(cfg, key)
        by_epoch = bool(options.get("by_epoch", True))
        _set_end(options, max_epochs if by_epoch else None, key)
        try:
            _check_options(kind, options, convert, key)
            if not issubclass(kind, TorchScheduler):
                _try(kind, options, convert)
        except ConfigError as error:
            raise _located(error, key) from None
        checked.append(CheckedScheduler(key, by_epoch and not convert, kind.need_val_args))
    return checked


def _set_end(options: dict[str, Any], end: float | None, where: str) -> None:
    """Let a schedule without an ``end`` of its own end with training.

    Raises:
        ConfigError: it would begin then.
    """
    if end is None or "end" in options:
        return
    begin = options.get("begin", 0)
    if isinstance(begin, (int, float)) and begin >= end:
        raise ConfigError(
            f"{where}.begin: {begin} is not allowed, training ends at {end:.4g} and the schedule would never act; give less, or "
            "train longer"
        )
    options["end"] = end


def _try(kind: Any, options: dict[str, Any], convert: bool) -> None:
    """Construct the scheduler with a stand-in for the optimizer, because only its constructor checks the ranges."""
    # These lists have one entry for each group.
    groups = max([len(options[key]) for key in ("eta_max", "min_value") if isinstance(options.get(key), list)] or [1])
    stand_in = _StandIn([_AnyGroup() for _ in range(groups)])
    options = {**options, "verbose": False}
    if convert:
        kind.build_iter_from_epoch(optimizer=stand_in, epoch_length=1000, **options)
    else:
        kind(optimizer=stand_in, **options)


class _AnyGroup(dict[str, Any]):
    """A parameter group that contains every key, with the value 1.0."""

    def __contains__(self, key: object) -> bool:
        return True

    def __missing__(self, key: str) -> float:
        return 1.0


@dataclass
class _StandIn:
    param_groups: list[dict[str, Any]]


def _each(cfgs: Any, where: str) -> Iterator[tuple[Any, str]]:
    if isinstance(cfgs, (list, tuple)):
        for i, cfg in enumerate(cfgs):
            yield cfg, f"{where}[{i}]"
    elif cfgs is not None:
        yield cfgs, where


def _resolve(cfg: Any, where: str) -> tuple[Any, dict[str, Any], bool]:
    """Return the class that ``cfg`` names, its arguments, and whether to convert them to iterations."""
    if isinstance(cfg, str) or inspect.isclass(cfg):
        cfg = {"type": cfg}
    refuse_foreign(cfg, where, "flextrain.optim.schedulers.ParamScheduler", PARAM_SCHEDULERS)
    if not isinstance(cfg, Mapping) or "type" not in cfg:
        raise ConfigError(f"{where}: {cfg!r} is not allowed, give dict(type=...) or a list of them")
    options = {name: value for name, value in cfg.items() if name not in ("type", "convert_to_iter_based")}
    try:
        kind = PARAM_SCHEDULERS.resolve(cfg["type"], f"{where}.type", NAMES)
        refuse_foreign(kind, f"{where}.type", "flextrain.optim.schedulers.ParamScheduler", PARAM_SCHEDULERS)
        bases = kind.__mro__ if inspect.isclass(kind) else ()
        if lr_scheduler.LRScheduler in bases:
            kind = torch_scheduler(kind)
        elif ParamScheduler not in bases:
            raise ConfigError(f"{where}.type: {kind!r} is no parameter scheduler, give a subclass of ParamScheduler")
    except ConfigError as error:
        raise _located(error, where) from None
    return kind, options, bool(cfg.get("convert_to_iter_based", False))


def _check_options(kind: Any, options: dict[str, Any], convert: bool, where: str) -> None:
    if convert:
        if options.get("by_epoch", True) is not True:
            raise ConfigError(f"{where}.convert_to_iter_based: needs by_epoch=True, there are no epochs to convert")
        # Numbers of epochs may be fractions, so types are checked after the conversion to iterations.
        options = kind.in_iterations(options, 1)
    check_call(kind, options, where, ("optimizer",))


def _located(error: ConfigError, where: str) -> ConfigError:
    message = str(error)
    return ConfigError(message if message.startswith(where) else f"{where}: {message}")
