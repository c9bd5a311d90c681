"""Preparation of a model, its optimizer and its schedules for a training loop of the user's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ...core.base.errors import ConfigError, one_of, suggest
from ...core.base.registry import MODELS
from ...optim.schedulers import build_param_schedulers
from ...optim.wrapper_dict import OptimWrapperDict, build_optim_wrapper
from ..base import Strategy
from ..building import construct

_LENGTHS = ("epoch_length", "max_epochs", "max_iters")


def prepare(
    strategy: Strategy,
    model: nn.Module | Mapping[str, Any] | type[nn.Module],
    *,
    optim_wrapper: Any = None,
    param_scheduler: Any = None,
    dispatch_kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Set up a model for a loop of one's own, without a runner; MMEngine's ``strategy.prepare``; a collective.

    The runner calls ``setup``. In the loop, ``update_params(loss)`` of the wrapper counts micro-batches itself. New loops rather use
    ``flextrain.Engine``, which reduces gradients once per update, weighs losses and saves checkpoints as the runner does.

    Args:
        model: a module, ``dict(type=...)`` or a class.
        optim_wrapper: the wrapper to train with, or its configuration.
        param_scheduler: one or a list, for every optimizer.
        dispatch_kwargs: ``dict(epoch_length=..., max_epochs=..., max_iters=...)``, for schedulers without an end.

    Returns:
        The module to call; with ``optim_wrapper`` a tuple of it and the wrapper; with ``param_scheduler`` also the
        list of schedulers, by name for several optimizers.

    Raises:
        StrategyError, ConfigError: a setting is not possible.
    """
    lengths = dict(dispatch_kwargs or {})
    for name in lengths:
        if name not in _LENGTHS:
            hint = suggest(name, _LENGTHS) or f", choose {one_of(_LENGTHS)}"
            raise ConfigError(f"dispatch_kwargs.{name}: unknown key{hint}")
    optim: Any = None if optim_wrapper is None else build_optim_wrapper(optim_wrapper)
    if optim is None and param_scheduler is not None:
        raise ConfigError("param_scheduler: has no meaning without optim_wrapper")
    strategy.check(model if isinstance(model, nn.Module) else None, optim)
    strategy.join()
    if not isinstance(model, nn.Module):
        given = model
        model = construct(strategy, lambda: MODELS.build(given, "model"))
    prepared, optim = strategy.setup(model, optim)
    if optim is None:
        return prepared
    for wrapper in optim.wrappers.values():  # the runner's loop checks before forward
        wrapper.register_step_pre_hook(lambda _: strategy.noted.check_unchanged())
    if param_scheduler is None:
        return prepared, optim
    lengths = {"epoch_length": None, **lengths}
    schedulers = {
        name: build_param_schedulers(param_scheduler, wrapper, **lengths) for name, wrapper in optim.wrappers.items()
    }
    return prepared, optim, schedulers if isinstance(optim, OptimWrapperDict) else schedulers[""]
