"""Translate the arguments of MMEngine's runner to those of flextrain's."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import mmengine.runner
from mmengine._strategy import BaseStrategy as Theirs
from mmengine.dataset import BaseDataset, pseudo_collate
from mmengine.registry import (
    DATA_SAMPLERS,
    DATASETS,
    FUNCTIONS,
    LOOPS,
    MODELS,
    PARAM_SCHEDULERS,
    STRATEGIES,
    TRANSFORMS,
    DefaultScope,
)

from ..core.config import check_call
from ..core.errors import ConfigError
from ..core.registry import DATA_SAMPLERS as OUR_SAMPLERS
from ..core.registry import DATASETS as OUR_DATASETS
from ..core.registry import LOOPS as OUR_LOOPS
from ..core.registry import MODELS as OUR_MODELS
from ..core.registry import PARAM_SCHEDULERS as OUR_SCHEDULERS
from ..core.registry import STRATEGIES as OUR_STRATEGIES
from ..runner.data.samplers import ShardedSampler
from ..runner.hooks import DEFAULT_HOOKS
from ..runner.loops.base import BaseLoop
from ..runner.loops.epoch import EpochBasedTrainLoop
from ..runner.loops.evaluate import TestLoop, ValLoop
from ..runner.loops.iteration import IterBasedTrainLoop
from .augmentation import adapted_tta
from .constructors import adapted_optim_wrapper
from .evaluation import adapted_evaluator
from .hooks import adapted_hook
from .log_processors import adapted_log_processor
from .registries import factory, found_in_scope, is_mmengines, refuse_unknown, translated, without
from .schedulers import adapted_scheduler
from .visualizers import adapted_visualizer

_READ_BY_MMENGINE = (
    "activation_checkpointing",
    "compile",
    "detect_anomalous_params",
    "efficient_conv_bn_eval",
    "find_unused_parameters",
    "model_wrapper_cfg",
    "sync_bn",
)
"""Names that MMEngine's runners read from the configuration; flextrain's says what takes the place of each."""


# Hooks of projects ask for the kind of a loop.
for _ours in (BaseLoop, EpochBasedTrainLoop, IterBasedTrainLoop, ValLoop, TestLoop):
    getattr(mmengine.runner, _ours.__name__).register(_ours)


def translated_arguments(given: Mapping[str, Any], cfg: Mapping[str, Any], scope: str | None) -> dict[str, Any]:
    """Return arguments for flextrain's FlexibleRunner.

    Args:
        given: the arguments for MMEngine's runner that were given.
        cfg: the whole configuration.
        scope: the default scope.

    Raises:
        ConfigError: an argument that cannot be taken; the message names it, and what to use.
    """
    found = dict(given)
    found["cfg"] = {name: cfg[name] for name in _READ_BY_MMENGINE if cfg.get(name)} or None
    _translate_model(found)
    for mode in ("train", "val", "test"):
        for key, translate in ((f"{mode}_dataloader", translated_dataloader), (f"{mode}_cfg", _loop)):
            if found.get(key) is not None:
                found[key] = translate(found[key], key)
    for key in ("val_evaluator", "test_evaluator"):
        if found.get(key) is not None:
            found[key] = adapted_evaluator(found[key], key, scope)
    if found.get("optim_wrapper") is not None:
        found["optim_wrapper"] = adapted_optim_wrapper(found["optim_wrapper"], "optim_wrapper", scope)
    if found.get("param_scheduler") is not None:
        found["param_scheduler"] = _schedulers(found["param_scheduler"], "param_scheduler")
    found["visualizer"] = adapted_visualizer(found.get("visualizer"), "visualizer")
    found["log_processor"] = adapted_log_processor(found.get("log_processor"), "log_processor")
    if found.get("strategy") is not None:
        found["strategy"] = _strategy(found["strategy"], "strategy")
    if isinstance(found.get("default_hooks"), Mapping):
        found["default_hooks"] = {name: _default_hook(name, hook) for name, hook in found["default_hooks"].items()}
    if isinstance(found.get("custom_hooks"), (list, tuple)):
        found["custom_hooks"] = [
            adapted_hook(hook, f"custom_hooks[{i}]") for i, hook in enumerate(found["custom_hooks"])
        ]
    if isinstance(scale := found.get("auto_scale_lr"), Mapping):
        found["auto_scale_lr"] = {"enable": False, **scale}  # MMEngine's default
    visualizer = found.pop("visualizer")
    return {**_ordinary(found), "visualizer": visualizer}


def _ordinary(value: Any) -> Any:
    """``value`` with the dicts that the runner itself reads as ordinary ones; arguments of classes stay as they are."""
    if isinstance(value, Mapping) and "type" not in value:
        return {key: _ordinary(item) for key, item in without(value).items()}
    return dict(value) if isinstance(value, Mapping) else value


def _translate_model(found: dict[str, Any]) -> None:
    model, preprocessor = found.get("model"), found.get("data_preprocessor")
    if isinstance(model, Mapping) and preprocessor is not None:
        # As in MMEngine, the model's own comes first, and some models add its type.
        found["model"] = model = {"data_preprocessor": preprocessor, **model}
        found["data_preprocessor"] = None
    elif isinstance(preprocessor, Mapping):
        found["data_preprocessor"] = translated(preprocessor, MODELS, "data_preprocessor")
    if isinstance(model, (Mapping, str)):
        model = _checked(translated(model, MODELS, "model", also=OUR_MODELS), "model")
    found["model"] = adapted_tta(model)


def _checked(cfg: Any, where: str, *provided: str) -> Any:
    """``cfg``, after the names of the arguments were compared with those that its class takes."""
    if isinstance(cfg, Mapping) and callable(cfg.get("type")):
        check_call(cfg["type"], {key: value for key, value in cfg.items() if key != "type"}, where, provided)
    return cfg


def translated_dataloader(cfg: Any, where: str) -> Any:
    """A dataloader's configuration for flextrain; anything else is returned as it is."""
    if not isinstance(cfg, Mapping):
        return cfg
    found = without(cfg)
    if "loader" in found:
        return found
    if isinstance(found.get("sampler"), Mapping) and _divides(found["sampler"]):
        found.setdefault("shard", False)
    if isinstance(found.get("dataset"), Mapping):
        _check_pipelines(found["dataset"], f"{where}.dataset")
        found["dataset"] = _checked(
            translated(found["dataset"], DATASETS, f"{where}.dataset", also=OUR_DATASETS), f"{where}.dataset"
        )
    for key in ("sampler", "batch_sampler"):
        if isinstance(found.get(key), Mapping):
            found[key] = _sampler(found[key], f"{where}.{key}")
    for key in ("collate_fn", "worker_init_fn"):
        if isinstance(found.get(key), (Mapping, str)):
            found[key] = _function(found[key])
    found.setdefault("collate_fn", pseudo_collate)
    return found


def _check_pipelines(cfg: Any, where: str) -> None:
    """Raise ConfigError for an unknown transform, or an argument that it lacks, where MMEngine itself builds transforms."""
    kind = found_in_scope(cfg, DATASETS) if isinstance(cfg, Mapping) and "type" in cfg else None
    if not inspect.isclass(kind):
        return
    with DefaultScope.overwrite_default_scope(cfg.get("_scope_")):
        if issubclass(kind, BaseDataset):
            _check_transforms(cfg.get("pipeline"), f"{where}.pipeline")
        elif is_mmengines(kind):  # RepeatDataset and others around a data set
            _check_pipelines(cfg.get("dataset"), f"{where}.dataset")
            for i, inner in enumerate(cfg.get("datasets") or ()):
                _check_pipelines(inner, f"{where}.datasets[{i}]")


def _check_transforms(given: Any, where: str) -> None:
    for i, cfg in enumerate(given if isinstance(given, (list, tuple)) else ()):
        key = f"{where}[{i}]"
        if isinstance(cfg, (list, tuple)):
            _check_transforms(cfg, key)
        elif isinstance(cfg, Mapping) and "type" in cfg:
            kind = found_in_scope(cfg, TRANSFORMS)
            if kind is None:
                refuse_unknown(cfg["type"], TRANSFORMS, (), f"{key}.type")
            else:
                check_call(factory(kind), without(cfg, "type"), key)
            if (getattr(kind, "__module__", None) or "").startswith("mmcv.transforms."):  # RandomChoice and others
                _check_transforms(cfg.get("transforms"), f"{key}.transforms")


def _divides(cfg: Mapping[str, Any]) -> bool:
    """Whether a sampler is of a project's own class, which divides the data itself: MMEngine asks that of every sampler."""
    kind = found_in_scope(cfg, DATA_SAMPLERS)
    is_own = inspect.isclass(kind) and not is_mmengines(kind) and not issubclass(kind, ShardedSampler)
    return is_own and not kind.__module__.startswith("torch.")


def _sampler(cfg: Mapping[str, Any], where: str) -> Any:
    kind = found_in_scope(cfg, DATA_SAMPLERS)
    ours = OUR_SAMPLERS if is_mmengines(kind) else None
    return translated(cfg, DATA_SAMPLERS, where, ours, also=OUR_SAMPLERS)


def _function(cfg: Any) -> Any:
    given = {"type": cfg} if isinstance(cfg, str) else {"type": None, **cfg}
    found = found_in_scope(given, FUNCTIONS)
    return cfg if found is None else {**without(given), "type": found}


def _loop(cfg: Any, where: str) -> Any:
    if not isinstance(cfg, Mapping) or "type" not in cfg:
        return cfg
    kind = found_in_scope(cfg, LOOPS)
    if kind is None:
        return without(cfg)
    if is_mmengines(kind) and kind.__name__ in OUR_LOOPS:
        return {**without(cfg), "type": kind.__name__}
    if any(is_mmengines(base) for base in getattr(kind, "__mro__", ())):
        raise ConfigError(
            f"{where}.type: {kind.__name__} is a loop of MMEngine, which works with MMEngine's runner only, derive it "
            f"from flextrain.runner.{_loop_of_ours(kind)}, whose methods are called alike"
        )
    return {**without(cfg), "type": kind}


def _loop_of_ours(kind: type) -> str:
    """Name of flextrain's loop to derive a project's loop from."""
    return next(
        (base.__name__ for base in kind.__mro__ if is_mmengines(base) and base.__name__ in OUR_LOOPS), "BaseLoop"
    )


def _schedulers(cfg: Any, where: str) -> Any:
    if isinstance(cfg, (list, tuple)):
        return [_schedulers(item, f"{where}[{i}]") for i, item in enumerate(cfg)]
    if isinstance(cfg, Mapping) and "type" not in cfg:
        return {name: _schedulers(item, f"{where}.{name}") for name, item in without(cfg).items()}
    kind = found_in_scope(cfg, PARAM_SCHEDULERS)
    given = without(cfg) if isinstance(cfg, Mapping) else {}
    bases: tuple[type, ...] = (kind if isinstance(kind, type) else type(kind)).__mro__
    if not any(is_mmengines(base) for base in bases):
        return given or cfg
    if isinstance(kind, type) and is_mmengines(kind) and kind.__name__ in OUR_SCHEDULERS:
        return {**given, "type": kind.__name__}
    if isinstance(kind, type) and (adapted := adapted_scheduler(kind)) is not None:
        return {**given, "type": adapted}
    name = bases[0].__name__
    raise ConfigError(
        f"{where}: {name} is a scheduler of MMEngine, which works with MMEngine's optimizer wrappers only, subclass one of "
        "flextrain.optim.schedulers"
    )


def _strategy(cfg: Any, where: str) -> Any:
    if isinstance(cfg, Theirs):
        raise ConfigError(f"{where}: MMEngine's {type(cfg).__name__} is built already, give dict(type=..., ...)")
    if isinstance(cfg, type) and issubclass(cfg, Theirs):
        cfg = {"type": cfg}
    return translated(cfg, STRATEGIES, where, OUR_STRATEGIES) if isinstance(cfg, Mapping) else cfg


def _default_hook(name: str, hook: Any) -> Any:
    if isinstance(hook, Mapping) and "type" not in hook and name in DEFAULT_HOOKS:
        hook = {**DEFAULT_HOOKS[name], **hook}
    return adapted_hook(hook, f"default_hooks.{name}")
