"""Parameter schedulers from a configuration."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from torch.optim import lr_scheduler

from ...core.config import check_call
from ...core.errors import ConfigError
from ...core.registry import PARAM_SCHEDULERS
from .base import HasParamGroups, ParamScheduler
from .torch_adapter import torch_scheduler


def build_param_schedulers(
    cfgs: Any,
    optimizer: HasParamGroups,
    *,
    epoch_length: int | None,
    max_epochs: int | None = None,
    max_iters: int | None = None,
    where: str = "param_scheduler",
) -> list[ParamScheduler]:
    """The schedulers that ``cfgs`` describes, in order, acting on ``optimizer``.

    Args:
        cfgs: None, one scheduler or a list: ``dict(type=..., **arguments)``, a name, a class, or an instance, which is
            returned as it is. ``convert_to_iter_based=True`` replaces epochs by iterations.
        optimizer: an OptimWrapper or a torch optimizer.
        epoch_length: iterations per epoch, needed for ``convert_to_iter_based``.
        max_epochs: the ``end`` of epoch-based schedulers that give none.
        max_iters: the ``end`` of iteration-based schedulers that give none.
        where: the configuration key, for messages.

    Raises:
        ConfigError: unknown type, or unknown, missing, wrongly typed or impossible arguments.
    """
    schedulers = []
    for cfg, key in _each(cfgs, where):
        if isinstance(cfg, ParamScheduler):
            schedulers.append(cfg)
            continue
        kind, options, convert = _resolve(cfg, key)
        end = max_epochs if options.get("by_epoch", True) else max_iters
        if end is not None:
            options.setdefault("end", end)
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


def check_param_schedulers(cfgs: Any, where: str = "param_scheduler") -> None:
    """Check types and arguments by name and plain type, before there is an optimizer; nothing is built.

    Raises:
        ConfigError: as `build_param_schedulers`, but for what depends on the optimizer or on a value's range.
    """
    for cfg, key in _each(cfgs, where):
        if not isinstance(cfg, ParamScheduler):
            kind, options, convert = _resolve(cfg, key)
            try:
                _check_options(kind, options, convert, key)
            except ConfigError as error:
                raise _located(error, key) from None


def _each(cfgs: Any, where: str) -> Iterator[tuple[Any, str]]:
    if isinstance(cfgs, (list, tuple)):
        for i, cfg in enumerate(cfgs):
            yield cfg, f"{where}[{i}]"
    elif cfgs is not None:
        yield cfgs, where


def _resolve(cfg: Any, where: str) -> tuple[Any, dict[str, Any], bool]:
    """The class that ``cfg`` names, its arguments, and whether they are to be converted to iterations."""
    if isinstance(cfg, str) or inspect.isclass(cfg):
        cfg = {"type": cfg}
    if not isinstance(cfg, Mapping) or "type" not in cfg:
        raise ConfigError(f"{where}: {cfg!r} is not allowed, give dict(type=...) or a list of them")
    options = {name: value for name, value in cfg.items() if name not in ("type", "convert_to_iter_based")}
    try:
        kind = PARAM_SCHEDULERS.get(cfg["type"], f"{where}.type")
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
        # What counts epochs may be a fraction here, so types are checked on what the constructor will see.
        options = kind.in_iterations(options, 1)
    check_call(kind, options, where, ("optimizer",))


def _located(error: ConfigError, where: str) -> ConfigError:
    message = str(error)
    return ConfigError(message if message.startswith(where) else f"{where}: {message}")
