"""OptimWrapperDict: several optimizers for the parts of one model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from ..core.base.config import refuse_foreign
from ..core.base.errors import CheckpointError, ConfigError, StrategyError, nearest, suggest
from ..core.base.overriding import overridden, refuse_unused
from ..core.base.registry import OPTIM_WRAPPERS
from ..core.device.precision import Precision
from .wrapper import OptimWrapper, StepInfo, UpdateGuard


@OPTIM_WRAPPERS.register_module()
class OptimWrapperDict(Mapping[str, OptimWrapper]):
    """OptimWrappers by name; the model's own ``train_step(data, optim_wrapper)`` decides which is updated when.

    An optimizer given as configuration gets the parameters of the submodule of the same name.

    Args:
        wrappers: at least one; accumulation and precision must be equal, because all share one window and one autocast
            context.
    """

    def __init__(self, **wrappers: OptimWrapper) -> None:
        if not wrappers:
            raise ConfigError("optim_wrapper: an OptimWrapperDict needs at least one optimizer")
        for name, wrapper in wrappers.items():
            if not isinstance(wrapper, OptimWrapper):
                raise ConfigError(
                    f"optim_wrapper.{name}: {type(wrapper).__name__} is not allowed, give an OptimWrapper"
                )
        first_name, first = next(iter(wrappers.items()))
        for name, wrapper in wrappers.items():
            for what in ("accumulate", "precision"):
                if getattr(wrapper, what) != getattr(first, what):
                    key = {"accumulate": "accumulative_counts"}.get(what, "type")
                    raise ConfigError(
                        f"optim_wrapper.{name}.{key}: differs from that of optim_wrapper.{first_name}, one window and "
                        "one precision are shared"
                    )
        self._wrappers = wrappers

    def __getitem__(self, name: str) -> OptimWrapper:
        if name not in self._wrappers:
            raise KeyError(f"no optimizer is called {name!r}{suggest(name, self._wrappers)}")
        return self._wrappers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._wrappers)

    def __len__(self) -> int:
        return len(self._wrappers)

    @property
    def _first(self) -> OptimWrapper:
        return next(iter(self._wrappers.values()))

    @property
    def wrappers(self) -> dict[str, OptimWrapper]:
        """The wrappers by name."""
        return self._wrappers

    @property
    def optim_wrappers(self) -> dict[str, OptimWrapper]:
        """MMEngine's name of ``wrappers``."""
        return self._wrappers

    @property
    def precision(self) -> Precision:
        """The precision, equal for all wrappers."""
        return self._first.precision

    @property
    def accumulate(self) -> int:
        """Micro-batches per update, equal for all wrappers."""
        return self._first.accumulate

    @property
    def last_step(self) -> StepInfo:
        """The outcome of the window's updates; skipped if every optimizer that had an update skipped it."""
        steps = [wrapper.last_step for wrapper in self._wrappers.values() if wrapper.has_stepped]
        return StepInfo(None, bool(steps) and all(step.skipped for step in steps))

    @property
    def has_stepped(self) -> bool:
        """See OptimWrapper; of any optimizer."""
        return any(wrapper.has_stepped for wrapper in self._wrappers.values())

    @property
    def has_updated(self) -> bool:
        """See OptimWrapper; by any optimizer."""
        return any(wrapper.has_updated for wrapper in self._wrappers.values())

    def observe_steps(self) -> None:
        """See OptimWrapper."""
        for wrapper in self._wrappers.values():
            wrapper.observe_steps()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all optimizers."""
        return [group for wrapper in self._wrappers.values() for group in wrapper.param_groups]

    def attach(self, device: torch.device, autocast: Callable[[], AbstractContextManager[None]]) -> None:
        """See OptimWrapper."""
        for wrapper in self._wrappers.values():
            wrapper.attach(device, autocast)

    def examine(self, model: nn.Module) -> None:
        """See OptimWrapper; each sees the submodule of its name."""
        parts = dict(model.named_children())
        for name, wrapper in self._wrappers.items():
            if name in parts:
                wrapper.examine(parts[name])

    def build(self, model: nn.Module) -> None:
        """Build each optimizer from the submodule of its name.

        Raises:
            StrategyError: the model has no such submodule.
        """
        parts = dict(model.named_children())
        for name, wrapper in self._wrappers.items():
            if wrapper.is_built:
                wrapper.build(model)
            elif name in parts:
                wrapper.build(parts[name])
            else:
                raise StrategyError(
                    f"optim_wrapper.{name}: the model has no submodule of this name{suggest(name, parts)}"
                )

    def begin(self, index: int, size: int) -> None:
        """See OptimWrapper."""
        for wrapper in self._wrappers.values():
            wrapper.begin(index, size)

    def initialize_count_status(self, model: nn.Module, init_counts: int, max_counts: int) -> None:
        """See OptimWrapper."""
        for wrapper in self._wrappers.values():
            wrapper.initialize_count_status(model, init_counts, max_counts)

    def optim_context(self, model: nn.Module) -> AbstractContextManager[None]:
        """See OptimWrapper."""
        return self._first.optim_context(model)

    def zero_grad(self) -> None:
        """Drop the gradients of all optimizers."""
        for wrapper in self._wrappers.values():
            wrapper.zero_grad()

    def update_params(self, *_: Any) -> NoReturn:
        """Raise StrategyError: choose an optimizer, as in ``optim_wrapper["generator"].update_params(loss)``."""
        raise StrategyError(
            f"optim_wrapper: has {len(self)} optimizers, update one: optim_wrapper[name].update_params(loss)"
        )

    backward = step = update_params

    def get_lr(self) -> dict[str, list[float]]:
        """Return the learning rates as ``{"<name>.lr": [...]}``."""
        return {f"{name}.lr": wrapper.get_lr()["lr"] for name, wrapper in self._wrappers.items()}

    def get_momentum(self) -> dict[str, list[float]]:
        """Return the momenta as ``{"<name>.momentum": [...]}``."""
        return {f"{name}.momentum": wrapper.get_momentum()["momentum"] for name, wrapper in self._wrappers.items()}

    def plain_values(self) -> dict[str, Any]:
        """Return the ``plain_values`` of each wrapper, by name."""
        return {name: wrapper.plain_values() for name, wrapper in self._wrappers.items()}

    def load_plain_values(self, state: dict[str, Any]) -> None:
        """Continue from ``plain_values``.

        Raises:
            CheckpointError: the optimizers have other names.
        """
        self._check_names(state)
        for name, wrapper in self._wrappers.items():
            wrapper.load_plain_values(state[name])

    def state_dict(self) -> dict[str, Any]:
        """Return the ``state_dict`` of each wrapper, by name, see OptimWrapper."""
        return {name: wrapper.state_dict() for name, wrapper in self._wrappers.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict``, see OptimWrapper.

        Raises:
            CheckpointError: the optimizers have other names.
        """
        self._check_names(state)
        for name, wrapper in self._wrappers.items():
            wrapper.load_state_dict(state[name])

    def _check_names(self, state: dict[str, Any]) -> None:
        if state.keys() != self._wrappers.keys():
            found, own = ", ".join(state) or "none", ", ".join(self._wrappers)
            raise CheckpointError(f"optim_wrapper: the checkpoint's optimizers are {found}, the configuration's {own}")

    def __repr__(self) -> str:
        return f"OptimWrapperDict({', '.join(f'{name}={wrapper!r}' for name, wrapper in self._wrappers.items())})"


# Build OptimWrappers from a configuration.


_DECIDE_ABOUT_UPDATES = ("step", "backward")
_NEVER_CALLED = {
    "initialize_count_status": "begin(index, size) says which micro-batch of its window comes next",
    "state_dict": "the strategy has the optimizer's state; override plain_values() to add plain values to checkpoints",
    "load_state_dict": "the strategy has the optimizer's state; override load_plain_values(state)",
}


def build_optim_wrapper(cfg: Any, where: str = "optim_wrapper") -> OptimWrapper | OptimWrapperDict:
    """Return the wrapper that a configuration describes; the strategy creates its torch optimizer later.

    Args:
        cfg: a wrapper; a torch optimizer; ``dict(optimizer=dict(type=...), ...)`` with an optional ``type`` of wrapper;
            or several of the latter by name, ``dict(generator=dict(...), discriminator=dict(...))``.
        where: the configuration key, for messages.

    Raises:
        ConfigError: any mistake that can be found without the model.
    """
    if isinstance(cfg, (OptimWrapper, OptimWrapperDict)):
        for each in (cfg, *cfg.wrappers.values()):
            refuse_unused(each, _NEVER_CALLED, where)
        return cfg
    if isinstance(cfg, Optimizer):
        return OptimWrapper(cfg, where=where)
    given = cfg.get("type") if isinstance(cfg, Mapping) else cfg
    if isinstance(given, str) and set(given) & set(":."):
        given = OPTIM_WRAPPERS.resolve(given, f"{where}.type")
    refuse_foreign(given, where, "flextrain.OptimWrapper", OPTIM_WRAPPERS)
    if not isinstance(cfg, Mapping):
        raise ConfigError(f"{where}: {cfg!r} is not allowed, give dict(optimizer=dict(type=...))")
    if "optimizer" in cfg or "type" in cfg:
        if "optimizer" not in cfg:
            raise ConfigError(_no_optimizer(cfg, where))
        wrapper = OPTIM_WRAPPERS.build({"type": "OptimWrapper", **cfg}, where)
        if not isinstance(wrapper, OptimWrapper):
            raise ConfigError(f"{where}.type: {cfg['type']!r} is no optimizer wrapper")
        refuse_unused(wrapper, _NEVER_CALLED, f"{where}.type")
        return wrapper
    if any(_is_wrapper(value) for value in cfg.values()):
        return OptimWrapperDict(**{name: _one(value, f"{where}.{name}") for name, value in cfg.items()})
    raise ConfigError(_no_optimizer(cfg, where))


def _no_optimizer(cfg: Mapping[str, Any], where: str) -> str:
    if misspelled := nearest("optimizer", cfg):
        return f'{where}.{misspelled}: unknown key, did you mean "optimizer"?'
    return f"{where}.optimizer: missing, give dict(type=...)"


def _is_wrapper(value: Any) -> bool:
    return isinstance(value, OptimWrapper) or (isinstance(value, Mapping) and "optimizer" in value)


def _one(cfg: Any, where: str) -> OptimWrapper:
    wrapper = build_optim_wrapper(cfg, where)
    assert isinstance(wrapper, OptimWrapper)
    return wrapper


def guard_updates(optim: OptimWrapper | OptimWrapperDict, *, skips: bool) -> None:
    """Make the wrappers skip updates whose loss or gradients are not finite; without ``skips``, make these updates too.

    Raises:
        ConfigError: a custom wrapper overrides ``step`` or ``backward``, which decide about updates.
    """
    for wrapper in optim.wrappers.values():
        if skips and (own := overridden(wrapper, *_DECIDE_ABOUT_UPDATES)):
            kind: Any = type(wrapper)
            raise ConfigError(
                f'env_cfg.nonfinite: "skip" has no effect on {kind.__name__}, which defines its own {own[0]}; choose '
                '"warn" or "raise"'
            )
        wrapper.guard = UpdateGuard() if skips else None


# Description of the optimizers as text, to be compared between processes.


def description(optim: OptimWrapper | OptimWrapperDict) -> dict[str, str]:
    """Return class, plain group settings and micro-batches per update of every optimizer, by configuration key."""
    found = {}
    for wrapper in optim.wrappers.values():
        prefix = f"{wrapper.where}.optimizer"
        found[f"{prefix}.type"] = type(wrapper.optimizer).__name__
        found[f"{wrapper.where}.accumulative_counts"] = str(wrapper.accumulate)
        for number, group in enumerate(wrapper.param_groups):
            settings = {key: value for key, value in group.items() if isinstance(value, (bool, int, float, str, tuple))}
            found |= {f"{prefix} group {number} {key}": repr(value) for key, value in settings.items()}
    return found
