"""Build parameter schedulers from a configuration."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.optim import lr_scheduler

from ...core.config import check_call
from ...core.errors import ConfigError
from ...core.foreign_classes import refuse_foreign
from ...core.registry import PARAM_SCHEDULERS
from .base import HasParamGroups, ParamScheduler
from .by_name import NAMES, named_schedule
from .torch_adapter import TorchScheduler, torch_scheduler


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
        max_iters: default ``end`` of iteration-based schedulers.
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
        end = max_epochs if options.get("by_epoch", True) else max_iters
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


def _set_end(options: dict[str, Any], end: int | None, where: str) -> None:
    """Let a schedule without an ``end`` of its own end with training.

    Raises:
        ConfigError: it would begin then.
    """
    if end is None or "end" in options:
        return
    begin = options.get("begin", 0)
    if isinstance(begin, (int, float)) and begin >= end:
        raise ConfigError(
            f"{where}.begin: {begin} is not allowed, training ends at {end} and the schedule would never act; give less, or "
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
