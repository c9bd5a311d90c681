"""Checks of the runner's arguments that need no process group and no model."""

from __future__ import annotations

import enum
import functools
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pydantic
import torch
from torch import nn

from ..core.base.config import check_call, refuse_foreign
from ..core.base.errors import ConfigError, counted, suggest
from ..core.base.registry import MODELS
from ..core.checkpoint.untrusted import one_line
from ..core.comm.agreement import first_difference
from ..core.hugging_face.pretrained import Pretrained
from ..core.model.base_model import BaseTTAModel, overrides
from ..optim.schedulers import check_param_schedulers
from ..optim.schedulers.replay import TYPE, before_the_warm_up_ends, sets_initial_values, settings, unlike_the_run
from ..optim.wrapper import OptimWrapper
from ..optim.wrapper_dict import OptimWrapperDict, build_optim_wrapper, guard_updates
from ..strategies.base import Strategy
from ..strategies.build import build_strategy
from .data.checks import check_dataloader, is_infinite, loader_and_shard
from .data.user_loaders import batch_size
from .hooks import EmptyCacheHook, Hook, NonFiniteHook, ParamSchedulerHook, ProfilerHook
from .hooks.build import build_hooks
from .hooks.checkpoint import CheckpointHook
from .loops.train import EpochBasedTrainLoop, EvalConfig, TrainConfig
from .metrics.evaluator import check_evaluator
from .options import FixedOptions, check_options, check_start
from .reporting import Visualizer, build_log_processor, build_visualizer, check_log_level
from .transforms.apply import Transform, build_transforms, check_left_out

if TYPE_CHECKING:
    from .run import TrainingProgress

_WRAPPING = "give strategy=dict(type=..., {})"
_IN_CFG = {
    "model_wrapper_cfg": _WRAPPING.format("model_wrapper=dict(...)"),
    "find_unused_parameters": _WRAPPING.format("find_unused_parameters=True"),
    "sync_bn": _WRAPPING.format('sync_bn="torch"'),
    "activation_checkpointing": "give strategy=dict(type=..., activation_checkpointing=dict(classes=[...]))",
    "efficient_conv_bn_eval": "there is no such thing here; leave it out",
    "detect_anomalous_params": _WRAPPING.format("detect_anomalous_params=True"),
}
"""Keys that MMEngine's runners read from ``cfg``."""


def check_cfg(cfg: Mapping[str, Any] | None) -> None:
    """Raise ConfigError for keys that MMEngine would read from ``cfg``; this runner reads only ``compile``."""
    for key, instead in _IN_CFG.items():
        if cfg is not None and cfg.get(key):
            raise ConfigError(f"cfg.{key}: has no effect, cfg is kept for the record; {instead}")


_LOADING = "call runner.load_checkpoint(path, strict=..., revise_keys=...) in place of load_from"
ELSEWHERE = {"strict": _LOADING, "revise_keys": _LOADING}
"""Names that are not arguments of a runner, and what to do instead."""


def check_loading(strict: Any, revise_keys: Any) -> None:
    """Check the arguments of ``load_checkpoint`` except the path.

    Raises:
        ConfigError: an invalid argument; the message names it, or the pair.
    """
    if not isinstance(strict, bool):
        raise ConfigError(f"strict: {strict!r} is not allowed, give True or False")
    if isinstance(revise_keys, str) or not isinstance(revise_keys, Sequence):
        raise ConfigError(f"revise_keys: {revise_keys!r} is not allowed, {_PAIRS}")
    for number, pair in enumerate(revise_keys):
        where = f"revise_keys[{number}]"
        is_pair = isinstance(pair, (list, tuple)) and len(pair) == 2
        if not is_pair or not all(isinstance(part, str) for part in pair):
            raise ConfigError(f"{where}: {pair!r} is not allowed, {_PAIRS}")
        pattern, replacement = pair
        try:
            re.sub(pattern, replacement, "")  # checks the replacement too, even if nothing matches
        except (re.error, IndexError) as error:
            raise ConfigError(f"{where}: {pair!r} is not allowed, {one_line(error)}") from None


_PAIRS = r'give pairs of a pattern and its replacement, as [(r"^module\.", "")]'


def check_compile(options: FixedOptions) -> bool | dict[str, Any] | None:
    """Return the value of ``compile``, which MMEngine accepts in two places."""
    other = (options.cfg or {}).get("compile")
    if options.compile is not None and other is not None and options.compile != other:
        raise ConfigError(f"compile: {options.compile} disagrees with cfg.compile={other}, give one of them")
    where, value = ("cfg.compile", other) if options.compile is None else ("compile", options.compile)
    if value is not None and not isinstance(value, (bool, dict)):
        raise ConfigError(f"{where}: {value!r} is not allowed, give True, False or arguments of torch.compile")
    if isinstance(value, dict):
        check_call(torch.compile, value, where, ("model",))
    return value


def check_model(model: Any, data_preprocessor: Any, *, takes_mmengines: bool = False) -> None:
    """Raise ConfigError if the model or its data preprocessor is invalid.

    Args:
        takes_mmengines: whether the runner calls subclasses of MMEngine's BaseModel as they expect.
    """
    where = "data_preprocessor"

    def refuse_mmengines(given: Any) -> None:  # MMEngine's other modules are called as any other
        if not takes_mmengines:
            refuse_foreign(given, "model", "flextrain.BaseModel", within="mmengine.model.base_model")

    if isinstance(data_preprocessor, (Mapping, str, type)):
        must_be(MODELS.check(data_preprocessor, where), nn.Module, f"{where}.type", "torch.nn.Module")
    elif data_preprocessor is not None and not isinstance(data_preprocessor, nn.Module):
        raise ConfigError(f"{where}: {data_preprocessor!r} is not allowed, give a module or dict(type=...)")
    if isinstance(model, Mapping) and (pretrained := Pretrained.of(model, "model")) is not None:
        if data_preprocessor is not None or where in model:
            raise ConfigError(f"{where}: {pretrained.name} takes none")
    elif isinstance(model, (Mapping, str)):
        kind = MODELS.check(model, "model")
        refuse_mmengines(kind)
        must_be(kind, nn.Module, "model.type", "torch.nn.Module")
        if data_preprocessor is not None and where not in model:
            with_preprocessor = {**(model if isinstance(model, Mapping) else {"type": model}), where: data_preprocessor}
            try:
                MODELS.check(with_preprocessor, "model")
            except ConfigError:
                raise ConfigError(f"{where}: {kind.__name__} takes none") from None
    elif isinstance(model, nn.Module):
        refuse_mmengines(model)
        if data_preprocessor is not None and not hasattr(model, where):
            raise ConfigError(f"{where}: {type(model).__name__} has no attribute of this name to set")
    elif callable(model):
        refuse_mmengines(model)
        check_call(model, {}, "model")
        must_be(model, nn.Module, "model", "torch.nn.Module")
    else:
        raise ConfigError(f"model: {type(model).__name__} is not allowed, give a module, dict(type=...), or a function")


def must_be(kind: Any, base: type, where: str, what: str) -> None:
    """Raise ConfigError if a class is not derived from ``base``; the result of a function can only be checked later."""
    if inspect.isclass(kind) and not issubclass(kind, base):
        raise ConfigError(f"{where}: {kind.__name__} is no {what}")


def check_phase(**parts: Any) -> bool:
    """Return True if the parts of train, val or test are given, which must be all or none.

    Raises:
        ConfigError: a part is missing; the message names it.
    """
    given = [key for key, value in parts.items() if value is not None]
    missing = [key for key, value in parts.items() if value is None]
    if given and missing:
        raise ConfigError(f"{missing[0]}: missing, {' and '.join(given)} {'is' if len(given) == 1 else 'are'} given")
    return bool(given)


def check_train(
    train_dataloader: Any,
    train_cfg: Any,
    optim_wrapper: Any,
    param_scheduler: Any,
    model: Any,
    *,
    scales_lr: bool,
    validates: bool,
) -> TrainConfig:
    """Check the arguments of training, and return what ``train_cfg`` says."""
    check_dataloader(train_dataloader, "train_dataloader")
    train_dataloader, _ = loader_and_shard(train_dataloader)
    config = TrainConfig.read(train_cfg)
    is_built = not isinstance(train_dataloader, Mapping)
    sampler = getattr(train_dataloader, "sampler", None) if is_built else train_dataloader.get("sampler")
    if sampler is not None and is_infinite(sampler) and issubclass(config.loop, EpochBasedTrainLoop):
        raise ConfigError("train_cfg.by_epoch: an InfiniteSampler has no epochs, give by_epoch=False and max_iters")
    size = batch_size(train_dataloader) if is_built else train_dataloader.get("batch_size", 1)
    if scales_lr and size is None and (is_built or train_dataloader.get("batch_sampler") is None):
        raise ConfigError("auto_scale_lr: the batch size of train_dataloader is not known, scale the rate yourself")
    if param_scheduler is not None:
        _check_schedulers(param_scheduler, optim_wrapper, config.by_epoch, config.max_epochs, validates)
    if isinstance(optim_wrapper, OptimWrapperDict):
        found = model_class(model)
        if found is not None and not overrides(found, "train_step"):
            name = found.__name__ if isinstance(found, type) else type(found).__name__
            raise ConfigError(
                f"optim_wrapper: has {len(optim_wrapper)} optimizers, {name} must define "
                "train_step(data, optim_wrapper) to say which is updated when"
            )
    return config


def _check_schedulers(given: Any, optim: Any, by_epoch: bool, max_epochs: int | None, validates: bool) -> None:
    where = "param_scheduler"
    named = isinstance(given, Mapping) and "type" not in given and isinstance(optim, OptimWrapperDict)
    for name in given if named else ():
        if name not in optim:
            raise ConfigError(f"{where}.{name}: no optimizer has this name{suggest(name, optim)}")
    parts = {f"{where}.{name}": cfg for name, cfg in given.items()} if named else {where: given}
    for key, cfg in parts.items():
        for found in check_param_schedulers(cfg, key, max_epochs=max_epochs):
            if found.needs_metrics and not validates:
                raise ConfigError(f"{found.where}: needs validation, give val_dataloader, val_cfg and val_evaluator")
            if found.by_epoch and not by_epoch and not found.needs_metrics:
                raise ConfigError(
                    f"{found.where}.by_epoch: True has no effect in iteration-based training, give by_epoch=False"
                )


def model_class(model: Any) -> Any:
    """Return the model if it is built, otherwise its class; None if only a function can tell."""
    if isinstance(model, nn.Module):
        return model
    kind = model["type"] if isinstance(model, Mapping) else model
    found = MODELS.resolve(kind, "model") if isinstance(kind, str) else kind
    return found if inspect.isclass(found) and issubclass(found, nn.Module) else None


def merging_model(model: Any) -> type | None:
    """Return the class of a model that merges predictions in testing; None if it is another kind, or not known yet.

    A function that makes one says its class in an attribute ``merges``.
    """
    made = getattr(model.get("type") if isinstance(model, Mapping) else model, "merges", None)
    if isinstance(made, type):
        return made
    found = model_class(model)
    kind = found if isinstance(found, type) else type(found)
    return kind if issubclass(kind, BaseTTAModel) else None


def check_evaluation(mode: str, dataloader: Any, cfg: Any, evaluator: Any) -> EvalConfig:
    """Check the arguments of validation or testing, and return what ``val_cfg`` or ``test_cfg`` says."""
    check_dataloader(dataloader, f"{mode}_dataloader", training=False)
    config = EvalConfig.read(cfg, mode)
    check_evaluator(evaluator, f"{mode}_evaluator")
    return config


# Check all arguments of a runner, and build the parts that need no process group and no model.


@dataclass(frozen=True)
class RunConfig:
    """The checked configuration of a run: its arguments, each read once, and the parts that need no process group.

    Attributes:
        given: the runner's arguments as they were given.
        options: those that are plain values.
        trains: whether the run can train; False also for a model that only merges predictions.
        by_epoch: whether training is counted in passes over the data; True without training.
        hooks: each with its priority.
        train: ``train_cfg``; None without the arguments of training. ``val`` and ``test`` are the same for evaluations.
    """

    given: Mapping[str, Any]
    options: FixedOptions
    strategy: Strategy
    optim_wrapper: OptimWrapper | OptimWrapperDict | None
    hooks: list[tuple[Hook, int]]
    visualizer: Visualizer
    trains: bool
    by_epoch: bool
    transforms: tuple[Transform, ...]
    train: TrainConfig | None
    val: EvalConfig | None
    test: EvalConfig | None

    @property
    def validates(self) -> bool:
        """Whether there is a validation."""
        return self.val is not None


def check_everything(given: Mapping[str, Any], *, takes_mmengines_models: bool = False) -> RunConfig:
    """Check the arguments of a runner.

    Args:
        given: the arguments.
        takes_mmengines_models: see ``check_model``.

    Raises:
        ConfigError: for the first invalid argument, which the message names.
    """
    options = check_options({key: given[key] for key in FixedOptions.model_fields})
    check_cfg(options.cfg)
    if given["default_scope"] not in (None, "flextrain", "mmengine"):
        raise ConfigError(
            f'default_scope: "{given["default_scope"]}" has no meaning, registries have no scopes; leave it out'
        )
    check_model(given["model"], given["data_preprocessor"], takes_mmengines=takes_mmengines_models)
    transforms = () if given["transforms"] is None else build_transforms(given["transforms"])
    trains = check_phase(**_parts(given, "train_dataloader", "train_cfg", "optim_wrapper"))
    validates = given["val_dataloader"] is not None
    scales_lr = options.auto_scale_lr is not None and options.auto_scale_lr.enable
    optim_wrapper, train = None, None
    if trains:
        optim_wrapper = build_optim_wrapper(given["optim_wrapper"])
        train = check_train(
            given["train_dataloader"],
            given["train_cfg"],
            optim_wrapper,
            given["param_scheduler"],
            given["model"],
            scales_lr=scales_lr,
            validates=validates,
        )
    else:
        _refuse_what_only_trains(given, scales_lr)
    if trains and (merging := merging_model(given["model"])) is not None:
        # A configuration of training whose model was replaced for runner.test(); runner.train() raises.
        if given["resume"]:
            raise ConfigError(f"resume: has no meaning with {merging.__name__}, which is only tested, give load_from")
        trains, optim_wrapper = False, None
    evaluations: dict[str, EvalConfig | None] = {}
    for mode in ("val", "test"):
        parts = _parts(given, f"{mode}_dataloader", f"{mode}_cfg", f"{mode}_evaluator")
        evaluations[mode] = check_evaluation(mode, *parts.values()) if check_phase(**parts) else None
    visualizer = build_visualizer(given["visualizer"])
    with visualizer.as_current():  # a hook may look for it when it is made
        hooks = build_hooks(given["default_hooks"], given["custom_hooks"], validates=validates)
    if options.env_cfg.nonfinite == "ignore":
        hooks = [(hook, priority) for hook, priority in hooks if not isinstance(hook, NonFiniteHook)]
    by_epoch = not trains or train is None or train.by_epoch
    check_log_level(given["log_level"])
    build_log_processor(given["log_processor"], by_epoch)  # for the check
    strategy = build_strategy(
        given["strategy"],
        given_as=dict(backend="env_cfg.dist_cfg.backend", timeout_s="env_cfg.dist_cfg.timeout"),
        launcher=options.launcher,
        backend=options.env_cfg.dist_cfg.backend,
        timeout_s=options.env_cfg.dist_cfg.timeout,
        compile=check_compile(options),
    )
    may_be_quantised = transforms or isinstance(given["model"], nn.Module)
    if trains and may_be_quantised and any(isinstance(hook, CheckpointHook) for hook, _ in hooks):
        check_left_out(transforms, given["model"], strategy.config.exclude_frozen_parameters)
    if options.load_from is not None and not strategy.config.exclude_frozen_parameters:
        check_start(options)
    if optim_wrapper is not None:
        guard_updates(optim_wrapper, skips=options.env_cfg.nonfinite == "skip")
        strategy.check(model_class(given["model"]), optim_wrapper)
    return RunConfig(
        given, options, strategy, optim_wrapper, hooks, visualizer, trains, by_epoch, transforms, train, **evaluations
    )


def _refuse_what_only_trains(given: Mapping[str, Any], scales_lr: bool) -> None:
    for key, is_given in (
        ("param_scheduler", given["param_scheduler"] or isinstance(given["param_scheduler"], Mapping)),
        ("auto_scale_lr", scales_lr),  # configurations for testing have it with enable=False
        ("resume", given["resume"] or isinstance(given["resume"], Mapping)),
    ):
        if is_given:
            raise ConfigError(f"{key}: has no meaning without train_dataloader, train_cfg and optim_wrapper")


def _parts(given: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: given[name] for name in names}


# Find what a configuration says and rarely means: things beyond the end of the run, a learning rate of 0.


def doubts(
    config: RunConfig,
    loop: TrainingProgress,
    optim: OptimWrapper | OptimWrapperDict,
    schedulers: Mapping[str, Sequence[Any]],
) -> Iterator[str]:
    """Yield a line for each such key, to be logged before training; the run is as configured all the same."""
    param_scheduler = config.given["param_scheduler"]
    if config.validates and config.train is not None:
        yield from _of_validation(config.train.arguments, loop)
    yield from _of_accumulation(loop)
    yield from _of_learning_rates(optim, schedulers)
    if any(schedulers.values()) and not any(isinstance(hook, ParamSchedulerHook) for hook, _ in config.hooks):
        yield "param_scheduler: has no effect unless a hook of yours steps it, default_hooks.param_scheduler is None"
    if (scale := config.options.auto_scale_lr) is not None and scale.enable:
        yield from _of_scaled_rates(param_scheduler, schedulers)
    for name, group in schedulers.items():
        by_name = bool(name) and isinstance(param_scheduler, Mapping) and "type" not in param_scheduler
        given = param_scheduler[name] if by_name and name in param_scheduler else param_scheduler
        where = f"param_scheduler.{name}" if by_name else "param_scheduler"
        for i, scheduler in enumerate(group):
            steps = loop.max_epochs if scheduler.by_epoch else loop.max_iters
            key = f"{where}[{i}]" if isinstance(given, (list, tuple)) else where
            for sentence in unlike_the_run(scheduler, steps):
                yield f"{key}.{sentence}"
        for i, sentence in before_the_warm_up_ends(group) if group else ():
            yield f"{where}[{i}].{sentence}"


def _of_scaled_rates(given: Any, schedulers: Mapping[str, Sequence[Any]]) -> Iterator[str]:
    every = [settings(scheduler) for group in schedulers.values() for scheduler in group]
    own = [each[TYPE] for each in every if sets_initial_values(each)]
    # The schedule "one_cycle" has its peak from the optimizer, whose rate is scaled.
    if own and "one_cycle" not in repr(given):
        yield (
            f"auto_scale_lr: does not scale {own[0]}, whose rates are its own arguments; scale these, or give "
            'param_scheduler="one_cycle", whose peak is the optimizer\'s rate'
        )


def _of_validation(cfg: Mapping[str, Any], loop: TrainingProgress) -> Iterator[str]:
    end, unit = (loop.max_epochs, "epoch") if loop.by_epoch else (loop.max_iters, "iteration")
    run = f"beyond the {counted(end, unit)} of training"
    begin, interval = cfg.get("val_begin"), cfg.get("val_interval")
    if begin is not None and begin > end:
        yield f"train_cfg.val_begin: {begin} is {run}, there is no validation; give at most {end}"
    elif interval is not None and interval > end:
        yield f"train_cfg.val_interval: {interval} is {run}, validation is done once, at the end; give less for more"
    given = cfg.get("dynamic_intervals") or ()
    for i, (milestone, _) in enumerate(given):
        if milestone in (begin for begin, _ in given[:i]):
            yield f"train_cfg.dynamic_intervals[{i}]: {milestone} is given twice, the larger interval holds from there; leave one out"
        if milestone > end:
            yield f"train_cfg.dynamic_intervals[{i}]: {milestone} is {run}, this interval is never used"


def _of_accumulation(loop: TrainingProgress) -> Iterator[str]:
    batches, size = loop.data.num_batches, loop.data.accumulate
    if batches is not None and size > batches:
        yield (
            f"optim_wrapper.accumulative_counts: {size} is more than the {counted(batches, 'batch', 'batches')} of an epoch, "
            f"windows end with the epoch and every update has {batches}; give at most {batches}"
        )


def _of_learning_rates(
    optim: OptimWrapper | OptimWrapperDict, schedulers: Mapping[str, Sequence[Any]]
) -> Iterator[str]:
    for wrapper in optim.wrappers.values():
        # A schedule may begin at 0; it multiplies the rate with which it began.
        rates = [float(group.get("initial_lr", group["lr"])) for group in wrapper.param_groups if "lr" in group]
        if rates and not any(rates):
            yield f"{wrapper.where}.optimizer.lr: 0 changes no weight; give more, or freeze the model's parameters"


# Check that all processes have the same configuration, except for settings that may differ.


# These arguments must agree completely. Data, folders and logging may differ between processes.
_ALIKE = (
    "model", "optim_wrapper", "train_cfg", "val_cfg", "test_cfg", "auto_scale_lr", "param_scheduler", "randomness", "compile", "transforms",
)  # fmt: skip
_PRESENT = ("train_dataloader", "val_dataloader", "test_dataloader", "load_from")
# A single process may have these hooks: they use no collectives and change nothing.
_LOOK_ON = (ProfilerHook, EmptyCacheHook)
_PLAIN_TYPES = (type(None), bool, int, float, str, enum.Enum, torch.dtype)


def check_agreement(config: RunConfig) -> None:
    """Raise ConfigError on every process if the configurations differ; a collective."""
    if found := first_difference(dict(_described(config))):
        raise ConfigError(f"{found}; every process has to be configured alike")


def _described(config: RunConfig) -> Iterator[tuple[str, str]]:
    given = config.given
    yield "strategy.type", _name(type(config.strategy))
    yield from _flat("strategy", config.strategy.config, leave_out=("timeout_s", "launcher"))
    for key in _ALIKE:
        yield from _flat(key, given[key])
    for key in _PRESENT:
        yield key, "not given" if given[key] is None else "given"
    yield "env_cfg.plan", "not given" if config.options.env_cfg.plan is None else "given"
    for mode in ("val", "test"):
        evaluator = given[f"{mode}_evaluator"]
        for i, metric in enumerate(evaluator if isinstance(evaluator, (list, tuple)) else [evaluator]):
            yield f"{mode}_evaluator[{i}].type", _kind(metric)
    resumed = config.options.resume_options
    yield "resume", "not given" if resumed is None else "given"
    if resumed is not None:
        yield from _flat("resume", resumed, leave_out=("path",))
    yield from _of_hooks([hook for hook, _ in config.hooks])


def _of_hooks(hooks: list[Hook]) -> Iterator[tuple[str, str]]:
    """Yield the library's hooks and their settings, because they may run collectives or change training."""
    home, counts = Hook.__module__.rpartition(".")[0], dict[str, int]()
    for hook in hooks:
        kind = next(cls for cls in type(hook).__mro__ if cls.__module__.startswith(home))
        if kind is Hook or issubclass(kind, _LOOK_ON):
            continue
        counts[kind.__name__] = number = counts.get(kind.__name__, 0) + 1
        name = kind.__name__ if number == 1 else f"{kind.__name__} {number}"
        yield name, "a hook"
        own = {
            key: value
            for key, value in vars(hook).items()
            if not key.startswith("_") and isinstance(value, _PLAIN_TYPES)
        }
        yield from _flat(name, own)


def _flat(key: str, value: Any, leave_out: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Yield dotted keys and values as text; an object gives only its class, because its contents cannot be compared."""
    if isinstance(value, pydantic.BaseModel):
        value = {name: getattr(value, name) for name in type(value).model_fields}
    if isinstance(value, Mapping):
        for name in value:
            if name not in leave_out:
                yield from _flat(f"{key}.{name}", value[name])
    elif isinstance(value, (list, tuple)):
        yield key, f"of length {len(value)}"
        for i, item in enumerate(value):
            yield from _flat(f"{key}[{i}]", item)
    elif isinstance(value, _PLAIN_TYPES):
        if not (isinstance(value, str) and ("/" in value or "\\" in value)):  # a path
            yield key, repr(value)
    else:
        yield key, _name(value)


def _kind(cfg: Any) -> str:
    """Return the type of a part, from the part itself or its configuration."""
    return repr(kind) if isinstance(kind := cfg.get("type") if isinstance(cfg, Mapping) else cfg, str) else _name(kind)


def _name(value: Any) -> str:
    """Return a class's or function's name; for another object its class, because its repr may hold an address."""
    if isinstance(value, functools.partial):
        return f"partial of {_name(value.func)}"
    named = value if inspect.isclass(value) or inspect.isroutine(value) else type(value)
    return f"{named.__module__}.{named.__qualname__}"
