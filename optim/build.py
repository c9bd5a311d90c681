"""Build OptimWrappers from a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from ..core.errors import ConfigError, nearest
from ..core.foreign_classes import refuse_foreign
from ..core.overriding import overridden, refuse_unused
from ..core.registry import OPTIM_WRAPPERS
from .update_guard import UpdateGuard
from .wrapper import OptimWrapper
from .wrapper_dict import OptimWrapperDict

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
