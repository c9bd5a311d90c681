"""MMEngine's hooks as hooks of flextrain."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import MethodType
from typing import TYPE_CHECKING, Any

import mmengine.hooks
import torch
from mmengine.hooks import Hook as TheirHook
from mmengine.model import BaseAveragedModel
from mmengine.model import BaseTTAModel as TheirTTAModel
from mmengine.registry import HOOKS, MODELS
from mmengine.runner import get_priority
from torch import nn

from ..core.base.config import check_call
from ..core.base.errors import ConfigError, nearest, suggest
from ..core.base.registry import HOOKS as OURS
from ..core.device.precision import running_statistics
from ..core.model.base_model import BaseTTAModel
from ..runner.hooks import POINTS, Hook
from ..runner.hooks.ema import local_part
from .registries import built_by, factory, find, found_in_scope, is_mmengines, refuse_unknown, translated, without

if TYPE_CHECKING:
    from ..runner.run import Run

# MMEngine's models for test-time augmentation as models of flextrain.


class AdaptedTTAModel(BaseTTAModel):
    """Merges predictions as a model of MMEngine does; the strategy has the model inside.

    Args:
        theirs: the model for test-time augmentation.
    """

    def __init__(self, theirs: TheirTTAModel) -> None:
        super().__init__(theirs.module)
        # As attributes, like methods that a user's object defines anew.
        vars(self)["merge_preds"] = theirs.merge_preds
        if type(theirs).test_step is not TheirTTAModel.test_step:
            vars(self)["test_step"] = theirs.test_step
        vars(theirs)["module"] = _Inside(self._predict)


class _Inside:
    """Stands for the model inside, whose predictions the strategy makes."""

    def __init__(self, predict: Callable[[Any], Any]) -> None:
        self.test_step = predict


def _adapted(
    build: Callable[..., TheirTTAModel], /, module: Any, data_preprocessor: Any = None, **arguments: Any
) -> AdaptedTTAModel:
    if data_preprocessor is not None:
        arguments["data_preprocessor"] = data_preprocessor
    # Not by its name: DeepSpeed wraps constructors in functions whose own first parameter is called "module".
    return AdaptedTTAModel(build(module, **arguments))


def adapted_tta(model: Any) -> Any:
    """``model`` for flextrain, if it is one for test-time augmentation or describes one; any other as it is."""
    if isinstance(model, TheirTTAModel):
        return AdaptedTTAModel(model)
    kind = built_by(model.get("type")) if isinstance(model, dict) else None
    if isinstance(kind, type) and issubclass(kind, TheirTTAModel):
        maker = functools.partial(_adapted, model["type"])
        maker.merges = kind  # type: ignore[attr-defined]  # says before it is called that this model is only tested
        return {**model, "type": maker}
    return model


# MMEngine's hooks that work with the insides of its runner, and what takes their places.
_INSTEAD = {
    name: f"flextrain.runner.hooks.{name.removeprefix('NPU')}"
    for name in (
        *("CheckpointHook", "LoggerHook", "EMAHook", "ParamSchedulerHook", "IterTimerHook", "RuntimeInfoHook"),
        *("ProfilerHook", "NPUProfilerHook", "PrepareTTAHook"),
    )
}

# Subclasses by projects that are MMEngine's hook unless one of these arguments has another value.
_SAME_UNLESS: dict[str, dict[str, Any]] = {
    "mmpretrain.engine.hooks.ema_hook.EMAHook": {"evaluate_on_ema": True, "evaluate_on_origin": False},
}


class SyncNormHook(Hook):
    """The projects' hook of this name, for parameters in any layout: before validation, statistics of norms become their means."""

    def before_val_epoch(self, runner: Run) -> None:
        """See the class; parameters are equal already."""
        found = running_statistics(runner.strategy.module).values()
        runner.strategy.topology.data.average([local_part(one) for one in found if one.is_floating_point()])


# Hooks of projects that take the whole of every tensor.
_OWN = dict.fromkeys(
    (f"{project}.engine.hooks.sync_norm_hook.SyncNormHook" for project in ("mmdet", "mmpose")), SyncNormHook
)


class AdaptedHook(Hook):
    """A hook of MMEngine.

    It has exactly the hook points that the other hook defines, so that the runner calls the methods directly.

    Args:
        make: gives the hook, once what its constructor may look for exists: the run's visualizer, message hub and logger.
        priority: its priority; None: that of the hook.
    """

    hook: TheirHook

    def __init__(self, make: Callable[[], TheirHook], priority: Any = None) -> None:
        self._make, self._given_priority = make, priority
        if priority is not None:
            self.priority = get_priority(priority)

    def build(self) -> None:
        """Make the hook, unless it is made already."""
        if "hook" in vars(self):
            return
        self.hook = self._make()
        if self._given_priority is None:
            self.priority = get_priority(self.hook.priority)
        for point in POINTS:
            if _defines(self.hook, point):
                setattr(self, point, _by_position(self.hook, point))


def _by_position(hook: TheirHook, point: str) -> Any:
    """The method for a hook point, which the runner calls with positional arguments; MMEngine's uses their names."""
    method = getattr(hook, point)
    names = [name for name in inspect.signature(getattr(Hook, point)).parameters if name not in ("self", "runner")]
    try:
        inspect.signature(method).bind(None, *names)
    except TypeError:  # such as (self, runner, **kwargs)

        def by_name(self: TheirHook, runner: Any, *values: Any, **named: Any) -> None:
            method(runner, **dict(zip(names, values, strict=False)), **named)

        return MethodType(by_name, hook)
    return method


def _check_names(kind: type, where: str) -> None:
    """Raise ConfigError if a method is named almost as a hook point, and would never be called."""
    known = [*POINTS, *(f"_{when}_{what}" for when in ("before", "after") for what in ("epoch", "iter"))]
    for name in sorted({*dir(kind)} - {*dir(TheirHook), *known}):
        is_near = name.lstrip("_").startswith(("before_", "after_")) and nearest(name, known, 0.85)
        if is_near and callable(getattr(kind, name)):
            raise ConfigError(
                f"{where}: {kind.__name__}.{name} is no hook point and would never be called{suggest(name, known)}"
            )


def _defines(hook: TheirHook, point: str) -> bool:
    """Whether a hook overrides a hook point, or the form for all modes that the hook point calls."""
    when, *_, what = point.split("_")
    for name in (point, f"_{when}_{what}"):
        own = getattr(type(hook), name, None)
        if name in vars(hook) or (own is not None and own is not getattr(TheirHook, name, None)):
            return True
    return False


def adapted_hook(cfg: Any, where: str) -> Any:
    """A hook, or its configuration, for flextrain: MMEngine's own are named, those of projects are adapted.

    Raises:
        ConfigError: the hook works with MMEngine's runner only, or an argument that it does not have.
    """
    if isinstance(cfg, TheirHook):
        if is_mmengines(type(cfg)) and type(cfg).__name__ in {*OURS, *_INSTEAD}:
            raise ConfigError(
                f"{where}: MMEngine's {type(cfg).__name__} is built already, give dict(type='{type(cfg).__name__}', ...), "
                "for which flextrain has its own"
            )
        _refuse_tied(type(cfg), where)
        return AdaptedHook(lambda: cfg)
    given: Any = {"type": cfg} if isinstance(cfg, (str, type)) else cfg
    if not isinstance(given, Mapping) or "type" not in given:
        return cfg
    found = found_in_scope(given, HOOKS)
    name = getattr(found, "__name__", "")
    if found is None:
        refuse_unknown(given["type"], HOOKS, OURS, f"{where}.type")
        return without(given)
    ours = without(given)
    path = f"{getattr(found, '__module__', None)}.{name}"
    if path in _OWN:
        return {**ours, "type": _OWN[path]}
    for key, value in _SAME_UNLESS.get(path, {}).items():
        if ours.pop(key, value) != value:
            raise ConfigError(f"{where}.{key}: {given[key]!r} is not allowed, flextrain's {name} has it always {value}")
        found = getattr(mmengine.hooks, name)
    if is_mmengines(found) and name in OURS:
        return {**_averaging(ours, where), "type": name, **_tta_of(ours, where)}
    if not (isinstance(found, type) and issubclass(found, TheirHook)):
        return cfg if isinstance(given["type"], type) else {**without(given), "type": found}
    _refuse_tied(found, f"{where}.type")
    arguments = without(given, "type", "priority")
    build = factory(found, given.get("_scope_"))
    check_call(build, arguments, where)
    return AdaptedHook(functools.partial(build, **arguments), given.get("priority"))


def _refuse_tied(kind: type, where: str) -> None:
    _check_names(kind, where)
    for base in kind.__mro__:
        if is_mmengines(base) and base.__name__ in _INSTEAD:
            raise ConfigError(
                f"{where}: {kind.__name__} is a {base.__name__} of MMEngine, which works with MMEngine's runner only, subclass "
                f"{_INSTEAD[base.__name__]}, or without its additions give type='mmengine.{base.__name__}'"
            )


def _averaging(cfg: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """``cfg`` of an EMAHook, with an averaged model of a project as a function that gives the share of the weights.

    Raises:
        ConfigError: its average is not between the old one and the weights, the same way for all of them.
    """
    kind = find(MODELS, cfg.get("ema_type"))
    if not (isinstance(kind, type) and issubclass(kind, BaseAveragedModel)):
        return cfg
    if is_mmengines(kind):
        return {**cfg, "ema_type": kind.__name__}
    own = {*inspect.signature(kind).parameters} - {"model", "interval", "device", "update_buffers"}
    theirs = kind(nn.Identity(), **{key: cfg[key] for key in own & cfg.keys()})

    def weight(updates: int) -> float:
        average = torch.tensor([0.0, 1.0, 3.0], dtype=torch.float64)
        theirs.avg_func(average, torch.tensor([1.0, 0.0, 3.0], dtype=torch.float64), updates)
        share = float(average[0])
        if not torch.allclose(average, average.new_tensor([share, 1 - share, 3.0])):
            raise ConfigError(f"{where}.ema_type: {kind.__name__}.avg_func does not mix the average and the weights")
        return share

    weight(1)
    return {**{key: value for key, value in cfg.items() if key not in own}, "ema_type": weight}


def _tta_of(cfg: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The argument of PrepareTTAHook, with a model of MMEngine adapted."""
    given = cfg.get("tta_cfg")
    if not isinstance(given, Mapping):
        return {}
    return {"tta_cfg": adapted_tta(translated(given, MODELS, f"{where}.tta_cfg"))}
