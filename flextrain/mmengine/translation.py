"""Translate the arguments of MMEngine's runner to those of flextrain's."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import mmengine.runner
from mmengine._strategy import BaseStrategy as TheirStrategy
from mmengine.dataset import BaseDataset, pseudo_collate
from mmengine.optim import OptimWrapper as TheirOptimWrapper
from mmengine.optim import OptimWrapperDict as TheirDict
from mmengine.optim.scheduler.param_scheduler import _ParamScheduler as TheirScheduler
from mmengine.registry import (
    DATA_SAMPLERS,
    DATASETS,
    FUNCTIONS,
    LOG_PROCESSORS,
    LOOPS,
    MODELS,
    OPTIM_WRAPPER_CONSTRUCTORS,
    OPTIM_WRAPPERS,
    OPTIMIZERS,
    PARAM_SCHEDULERS,
    STRATEGIES,
    TRANSFORMS,
    DefaultScope,
)
from mmengine.runner import LogProcessor as TheirLogProcessor
from torch import Tensor, nn
from torch.optim import Optimizer

from ..core.base.config import check_call
from ..core.base.errors import ConfigError
from ..core.base.registry import DATA_SAMPLERS as OUR_SAMPLERS
from ..core.base.registry import DATASETS as OUR_DATASETS
from ..core.base.registry import LOOPS as OUR_LOOPS
from ..core.base.registry import MODELS as OUR_MODELS
from ..core.base.registry import OPTIM_WRAPPER_CONSTRUCTORS as OUR_CONSTRUCTORS
from ..core.base.registry import OPTIM_WRAPPERS as OUR_WRAPPERS
from ..core.base.registry import PARAM_SCHEDULERS as OUR_SCHEDULERS
from ..core.base.registry import STRATEGIES as OUR_STRATEGIES
from ..optim.schedulers import INF, ParamScheduler
from ..optim.schedulers.base import HasParamGroups
from ..runner.data.samplers import ShardedSampler
from ..runner.hooks import DEFAULT_HOOKS
from ..runner.loops.base import BaseLoop
from ..runner.loops.evaluate import TestLoop, ValLoop
from ..runner.loops.train import EpochBasedTrainLoop, IterBasedTrainLoop
from ..runner.reporting import LogProcessor
from ..runner.reporting.message_hub import AVERAGED
from .evaluation import adapted_evaluator
from .hooks import adapted_hook, adapted_tta
from .registries import factory, find, found_in_scope, is_mmengines, refuse_unknown, translated, without
from .visualizers import adapted_visualizer

# MMEngine's optimizer wrappers and their constructors, for flextrain's optimizer wrappers.


def adapted_optim_wrapper(cfg: Any, where: str, scope: str | None) -> Any:
    """``optim_wrapper`` for flextrain, from MMEngine's configuration of one or several.

    Raises:
        ConfigError: a wrapper that works with MMEngine's runner only.
    """
    if isinstance(cfg, (TheirOptimWrapper, TheirDict)):
        raise ConfigError(
            f"{where}: MMEngine's {type(cfg).__name__} is built already, give dict(type=..., optimizer=dict(...)) or the torch "
            "optimizer"
        )
    if not isinstance(cfg, Mapping):
        return cfg
    if "optimizer" not in cfg and "type" not in cfg:
        return _several(cfg, where, scope)
    found = without(cfg)
    if "type" in found:
        kind = found_in_scope(cfg, OPTIM_WRAPPERS)
        if isinstance(kind, type) and issubclass(kind, TheirOptimWrapper):
            if not is_mmengines(kind) or kind.__name__ not in OUR_WRAPPERS:
                raise ConfigError(
                    f"{where}.type: {kind.__name__} is a wrapper of MMEngine, which works with MMEngine's runner only, subclass "
                    "flextrain.OptimWrapper"
                )
            found["type"] = kind.__name__
    if "optimizer" in found:
        found["optimizer"] = translated(found["optimizer"], OPTIMIZERS, f"{where}.optimizer")
    if "constructor" in found:
        found["constructor"] = _constructor(found["constructor"], found.get("optimizer"), f"{where}.constructor", scope)
    return found


def _several(cfg: Mapping[str, Any], where: str, scope: str | None) -> dict[str, Any]:
    found = dict(cfg)
    constructor = found.pop("constructor", None)
    if constructor is not None:
        kind = find(OPTIM_WRAPPER_CONSTRUCTORS, constructor) or constructor
        raise ConfigError(
            f"{where}.constructor: {getattr(kind, '__name__', kind)} makes several optimizers, which flextrain does without one: "
            f"each of {', '.join(found)} optimizes the part of the model that has its name; leave it out"
        )
    return {
        name: adapted_optim_wrapper(value, f"{where}.{name}", scope)
        if isinstance(value, (Mapping, TheirOptimWrapper))
        else value
        for name, value in found.items()
    }


def _constructor(given: Any, optimizer: Any, where: str, scope: str | None) -> Any:
    kind = find(OPTIM_WRAPPER_CONSTRUCTORS, given)
    if kind is None or (is_mmengines(kind) and kind.__name__ in OUR_CONSTRUCTORS):
        return kind.__name__ if kind is not None else given
    if callable(getattr(kind, "param_groups", None)):  # one of flextrain
        return kind
    if not isinstance(optimizer, Mapping):
        raise ConfigError(
            f"{where}: {kind.__name__} makes the optimizer, which is built already; give its dict(type=...)"
        )
    return type(kind.__name__, (AdaptedConstructor,), {"kind": kind, "scope": scope})


class AdaptedConstructor:
    """Makes the parameter groups that an optimizer wrapper constructor of MMEngine makes.

    The constructor runs as it is, with an optimizer that keeps the groups; the strategy makes the real one from them. A
    subclass says which constructor, and in which default scope it looks for names.

    Args:
        optim_wrapper_cfg: holds the optimizer's configuration under "optimizer".
        paramwise_cfg: the constructor's own settings.
        where: the configuration key, for messages.
    """

    kind: ClassVar[Any]
    scope: ClassVar[str | None]

    def __init__(
        self,
        optim_wrapper_cfg: Mapping[str, Any],
        paramwise_cfg: Mapping[str, Any] | None = None,
        *,
        where: str = "optim_wrapper",
    ) -> None:
        optimizer = {**optim_wrapper_cfg["optimizer"], "type": _Groups}
        self._where = where
        self._constructor = self.kind({"type": TheirOptimWrapper, "optimizer": optimizer}, paramwise_cfg)

    def param_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Return the groups for a torch optimizer.

        Raises:
            ConfigError: the constructor builds an optimizer of its own.
        """
        with DefaultScope.overwrite_default_scope(self.scope):
            wrapper = self._constructor(model)
        made = getattr(wrapper, "optimizer", None)
        if not isinstance(made, _Groups):
            name = type(self._constructor).__name__
            raise ConfigError(
                f"{self._where}.constructor: {name} gave {type(made).__name__}, it must build the optimizer that the "
                "configuration names, with OPTIMIZERS.build"
            )
        return made.given


class _Groups(Optimizer):
    """Keeps the parameter groups that it is given, without the defaults of an optimizer."""

    def __init__(self, params: Iterable[Any], **settings: Any) -> None:
        given = list(params)
        if given and isinstance(given[0], Tensor):
            given = [{"params": given}]
        self.given = [{**group, "params": _listed(group["params"])} for group in given]
        super().__init__([dict(group) for group in self.given], {})


def _listed(params: Any) -> list[Any]:
    return [params] if isinstance(params, Tensor) else list(params)


# Schedulers that projects derive from MMEngine's, as schedulers of flextrain.


_WINDOW = ("begin", "end", "last_step", "by_epoch", "verbose")


class AdaptedScheduler(ParamScheduler):
    """Sets the values that ``_get_value`` of a project's scheduler gives, which it computes from step and groups.

    A subclass, made by ``adapted_scheduler``, says which scheduler. It has its arguments.
    """

    kind: ClassVar[type[TheirScheduler]]
    _unsaved = frozenset({"_theirs", "_options"})

    def __init__(self, optimizer: HasParamGroups, **options: Any) -> None:
        self._become(optimizer, self._made(self.kind, optimizer, options), options)

    @classmethod
    def build_iter_from_epoch(
        cls, *args: Any, epoch_length: int | None = None, by_epoch: bool = True, **options: Any
    ) -> AdaptedScheduler:
        """See ParamScheduler; the project's own method converts its arguments."""
        optimizer = args[0] if args else options.pop("optimizer")
        convert = functools.partial(cls.kind.build_iter_from_epoch, epoch_length=epoch_length, by_epoch=by_epoch)
        scheduler = cls.__new__(cls)
        scheduler._become(optimizer, cls._made(convert, optimizer, options), options)
        return scheduler

    @classmethod
    def _made(cls, make: Any, optimizer: HasParamGroups, options: Mapping[str, Any]) -> TheirScheduler:
        """MMEngine's scheduler, whose constructor sets the values of copies."""
        try:
            return make(optimizer=_ParamGroups([copy.copy(group) for group in optimizer.param_groups]), **options)
        except (AssertionError, TypeError, ValueError, KeyError) as error:
            raise ConfigError(f"{cls.kind.__name__}: {' '.join(str(error).split())}") from error

    def _become(self, optimizer: HasParamGroups, theirs: TheirScheduler, options: Mapping[str, Any]) -> None:
        self._theirs, self._options = theirs, {key: value for key, value in options.items() if key not in _WINDOW}
        window = {"begin": theirs.begin, "end": min(theirs.end, INF), "by_epoch": theirs.by_epoch}
        window |= {"last_step": options.get("last_step", -1), "verbose": theirs.verbose}
        super().__init__(optimizer, theirs.param_name, **window)

    def _get_value(self) -> list[float]:
        theirs = self._theirs
        theirs.optimizer.param_groups = self.optimizer.param_groups
        theirs.last_step, theirs._global_step, theirs.base_values = self.last_step, self._global_step, self.base_values
        return list(theirs._get_value())

    def __getattr__(self, name: str) -> Any:
        if name in (options := vars(self).get("_options", {})):
            return options[name]
        raise AttributeError(name)


@functools.cache
def adapted_scheduler(kind: type[TheirScheduler]) -> type[AdaptedScheduler] | None:
    """The subclass of AdaptedScheduler for ``kind``; None if ``kind`` has a way of its own to make a step."""
    if any(
        getattr(kind, name) is not getattr(TheirScheduler, name) for name in ("step", "state_dict", "load_state_dict")
    ):
        return None
    named = {
        p.name: p.replace(kind=p.KEYWORD_ONLY)
        for base in reversed(kind.__mro__)
        if "__init__" in vars(base) and base is not object
        for p in inspect.signature(vars(base)["__init__"]).parameters.values()
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name not in ("self", "param_name")
    }
    own = {"kind": kind, "__signature__": inspect.Signature(list(named.values())), "__doc__": kind.__doc__}
    return type(kind.__name__, (AdaptedScheduler,), own)


class _ParamGroups(Optimizer):
    """An Optimizer that only holds parameter groups: MMEngine's schedulers require one."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        # Optimizer's constructor is not called, because it would copy the groups.
        self.param_groups = groups
        self.defaults = {}

    def step(self, closure: Any = None) -> Any:
        return None


# MMEngine's LogProcessors as LogProcessors of flextrain.


class AdaptedLogProcessor(LogProcessor):
    """Lets a project's LogProcessor make log lines and records, from the scalars of the run.

    Args:
        theirs: the LogProcessor.
    """

    def __init__(self, theirs: TheirLogProcessor) -> None:
        super().__init__(
            window_size=theirs.window_size,
            by_epoch=theirs.by_epoch,
            num_digits=theirs.num_digits,
            log_with_hierarchy=theirs.log_with_hierarchy,
        )
        self.theirs = theirs

    def get_log_after_iter(self, runner: Any, batch_idx: int, mode: Any) -> tuple[dict[str, Any], str]:
        """See LogProcessor."""
        runner.message_hub.fetch(f"{mode}/", reduce=AVERAGED if mode == "train" else None)
        record, line = self.theirs.get_log_after_iter(runner, batch_idx, mode)
        return dict(record), line

    def get_log_after_epoch(
        self, runner: Any, batch_idx: int, mode: Any, with_non_scalar: bool = False
    ) -> tuple[dict[str, Any], str]:
        """See LogProcessor."""
        record, line = self.theirs.get_log_after_epoch(runner, batch_idx, mode, with_non_scalar)
        return dict(record), line


def adapted_log_processor(cfg: Any, where: str) -> Any:
    """``log_processor`` for flextrain's runner, whose own takes the place of MMEngine's."""
    if isinstance(cfg, TheirLogProcessor):
        return AdaptedLogProcessor(cfg)
    if not isinstance(cfg, Mapping) or "type" not in cfg:
        return cfg
    found = found_in_scope(cfg, LOG_PROCESSORS)
    if not (isinstance(found, type) and issubclass(found, TheirLogProcessor)):
        return without(cfg)
    arguments = without(cfg, "type")
    if is_mmengines(found):
        return arguments
    check_call(factory(found), arguments, where)
    return AdaptedLogProcessor(found(**arguments))


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
    if isinstance(cfg, TheirStrategy):
        raise ConfigError(f"{where}: MMEngine's {type(cfg).__name__} is built already, give dict(type=..., ...)")
    if isinstance(cfg, type) and issubclass(cfg, TheirStrategy):
        cfg = {"type": cfg}
    return translated(cfg, STRATEGIES, where, OUR_STRATEGIES) if isinstance(cfg, Mapping) else cfg


def _default_hook(name: str, hook: Any) -> Any:
    if isinstance(hook, Mapping) and "type" not in hook and name in DEFAULT_HOOKS:
        hook = {**DEFAULT_HOOKS[name], **hook}
    return adapted_hook(hook, f"default_hooks.{name}")
