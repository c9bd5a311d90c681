"""MMEngine's hooks as hooks of flextrain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmengine.hooks import Hook as Theirs
from mmengine.registry import HOOKS
from mmengine.runner import get_priority

from ..core.config import check_call
from ..core.errors import ConfigError
from ..core.registry import HOOKS as OURS
from ..runner.hooks import POINTS, Hook
from .registries import factory, found_in_scope, is_mmengines

# MMEngine's hooks that work with the insides of its runner, and what takes their places.
_INSTEAD = {
    "CheckpointHook": "flextrain.runner.hooks.CheckpointHook",
    "LoggerHook": "flextrain.runner.hooks.LoggerHook",
    "EMAHook": "flextrain.runner.hooks.EMAHook",
    "ParamSchedulerHook": "flextrain.runner.hooks.ParamSchedulerHook",
    "IterTimerHook": "flextrain.runner.hooks.IterTimerHook",
    "RuntimeInfoHook": "flextrain.runner.hooks.RuntimeInfoHook",
    "ProfilerHook": "flextrain.runner.hooks.ProfilerHook",
    "NPUProfilerHook": "flextrain.runner.hooks.ProfilerHook",
}
_PREPARE_TTA = "test with model=dict(type=<the TTA model>, module=dict(...)) and load_from"


class AdaptedHook(Hook):
    """A hook of MMEngine.

    It has exactly the hook points that the other hook defines, so that the runner calls the methods directly.

    Args:
        hook: the hook.
        priority: its priority, from 0 to 100.
    """

    def __init__(self, hook: Theirs, priority: int) -> None:
        self.hook = hook
        self.priority = priority
        for point in POINTS:
            if _defines(hook, point):
                setattr(self, point, getattr(hook, point))


def _defines(hook: Theirs, point: str) -> bool:
    """Whether a hook overrides a hook point, or the form for all modes that the hook point calls."""
    when, *_, what = point.split("_")
    for name in (point, f"_{when}_{what}"):
        own = getattr(type(hook), name, None)
        if name in vars(hook) or (own is not None and own is not getattr(Theirs, name, None)):
            return True
    return False


def adapted_hook(cfg: Any, where: str) -> Any:
    """A hook, or its configuration, for flextrain: MMEngine's own are named, those of projects are adapted.

    Raises:
        ConfigError: the hook works with MMEngine's runner only, or an argument that it does not have.
    """
    if isinstance(cfg, Theirs):
        if is_mmengines(type(cfg)) and type(cfg).__name__ in {*OURS, *_INSTEAD}:
            raise ConfigError(
                f"{where}: MMEngine's {type(cfg).__name__} is built already, give dict(type='{type(cfg).__name__}', ...), "
                "for which flextrain has its own"
            )
        _refuse_tied(type(cfg), where)
        return AdaptedHook(cfg, get_priority(cfg.priority))
    given: Any = {"type": cfg} if isinstance(cfg, (str, type)) else cfg
    if not isinstance(given, Mapping) or "type" not in given:
        return cfg
    found = found_in_scope(given, HOOKS)
    name = getattr(found, "__name__", "")
    if found is None or (is_mmengines(found) and name in OURS):
        return {**given, "type": name} if found is not None else cfg
    if not (isinstance(found, type) and issubclass(found, Theirs)):
        return cfg if isinstance(given["type"], type) else {**given, "type": found}
    _refuse_tied(found, f"{where}.type")
    arguments = {key: value for key, value in given.items() if key not in ("type", "priority", "_scope_")}
    build = factory(found, given.get("_scope_"))
    check_call(build, arguments, where)
    hook = build(**arguments)
    return AdaptedHook(hook, get_priority(given.get("priority", hook.priority)))


def _refuse_tied(kind: type, where: str) -> None:
    for base in kind.__mro__:
        if is_mmengines(base) and base.__name__ in _INSTEAD:
            raise ConfigError(
                f"{where}: {kind.__name__} is a {base.__name__} of MMEngine, which works with MMEngine's runner only, subclass "
                f"{_INSTEAD[base.__name__]}"
            )
        if is_mmengines(base) and base.__name__ == "PrepareTTAHook":
            raise ConfigError(f"{where}: {kind.__name__} replaces the runner's model, {_PREPARE_TTA}")
