"""Preparation of a model, its optimizer and its schedules for a training loop of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import nn

from ..core.errors import ConfigError, one_of, suggest
from ..core.registry import MODELS
from ..optim.build import build_optim_wrapper
from ..optim.schedulers import build_param_schedulers
from ..optim.wrapper_dict import OptimWrapperDict

_LENGTHS = ("epoch_length", "max_epochs", "max_iters")


class SetsUp(Protocol):
    """The methods of a strategy that are called."""

    def setup_environment(self) -> None:
        """See ProcessEnvironment."""

    def construct(self, make: Callable[[], nn.Module]) -> nn.Module:
        """See Strategy."""

    def check(self, model: Any, optim: Any) -> None:
        """See Strategy."""

    def setup(self, model: nn.Module, optim: Any = None) -> tuple[nn.Module, Any]:
        """See Strategy."""

    def check_unchanged(self) -> None:
        """See Strategy."""


def prepare(
    strategy: SetsUp, model: Any, optim_wrapper: Any, param_scheduler: Any, dispatch_kwargs: Mapping[str, Any] | None
) -> Any:
    """See ``Strategy.prepare``."""
    lengths = dict(dispatch_kwargs or {})
    for name in lengths:
        if name not in _LENGTHS:
            hint = suggest(name, _LENGTHS) or f", choose {one_of(_LENGTHS)}"
            raise ConfigError(f"dispatch_kwargs.{name}: unknown key{hint}")
    optim = None if optim_wrapper is None else build_optim_wrapper(optim_wrapper)
    if optim is None and param_scheduler is not None:
        raise ConfigError("param_scheduler: has no meaning without optim_wrapper")
    strategy.check(model if isinstance(model, nn.Module) else None, optim)
    strategy.setup_environment()
    if not isinstance(model, nn.Module):
        given = model
        model = strategy.construct(lambda: MODELS.build(given, "model"))
    prepared, optim = strategy.setup(model, optim)
    if optim is None:
        return prepared
    for wrapper in optim.wrappers.values():  # the runner's loop checks before forward
        wrapper.register_step_pre_hook(lambda _: strategy.check_unchanged())
    if param_scheduler is None:
        return prepared, optim
    lengths = {"epoch_length": None, **lengths}
    schedulers = {
        name: build_param_schedulers(param_scheduler, wrapper, **lengths) for name, wrapper in optim.wrappers.items()
    }
    return prepared, optim, schedulers if isinstance(optim, OptimWrapperDict) else schedulers[""]
