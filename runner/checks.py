"""What can be said about a runner's configuration before anything is started."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from torch import nn
from torch.utils.data import DataLoader

from ..core.config import Config, check_call, validate
from ..core.errors import ConfigError, suggest
from ..core.model import overrides
from ..core.registry import HOOKS, LOOPS, MODELS
from ..optim.schedulers import check_param_schedulers
from ..optim.wrapper_dict import OptimWrapperDict
from .data import InfiniteSampler, check_dataloader
from .evaluation import check_evaluator
from .hooks import DEFAULT_HOOKS, Hook
from .loops import EpochBasedTrainLoop, IterBasedTrainLoop
from .reporting import build_log_processor, build_reporters


class AutoScaleLR(Config):
    """``auto_scale_lr``: learning rates are multiplied by the real batch size over the one that they were chosen for."""

    base_batch_size: int
    """Samples per update, over all processes, that the learning rate was chosen for."""
    enable: bool = True
    """False turns it off."""


class Randomness(Config):
    """``randomness``."""

    seed: int | None = None
    """Of Python, NumPy and torch; None draws one, which is logged."""
    diff_rank_seed: bool = False
    """Add the rank to the seed."""
    deterministic: bool = False
    """Deterministic kernels only."""


class MultiProcessing(Config):
    """``env_cfg.mp_cfg``."""

    mp_start_method: Literal["fork", "spawn", "forkserver"] | None = None
    """How dataloader workers are started; None is Python's default."""
    opencv_num_threads: int | None = None
    """Threads of OpenCV in each process."""


class Group(Config):
    """``env_cfg.dist_cfg``."""

    backend: str | None = None
    """Process-group back end; None is the device's."""
    timeout: float | int | None = None
    """Seconds that a process waits for others."""


class Environment(Config):
    """``env_cfg``."""

    cudnn_benchmark: bool = False
    """Let cuDNN try its algorithms for every new shape."""
    mp_cfg: MultiProcessing = MultiProcessing()
    """Worker processes."""
    dist_cfg: Group = Group()
    """The process group."""
    resource_limit: int = 4096
    """Open files that the process may have, at least."""


class FixedOptions(Config):
    """The arguments of a runner that are plain values."""

    work_dir: str | Path
    experiment_name: str | None = None
    load_from: str | Path | None = None
    resume: bool | str | Path = False
    launcher: str | None = None
    auto_scale_lr: AutoScaleLR | None = None
    randomness: Randomness
    env_cfg: Environment
    compile: bool | dict[str, Any] | None = None
    cfg: dict[str, Any] | None = None


def check_options(given: Mapping[str, Any]) -> FixedOptions:
    """The plain arguments, checked.

    Raises:
        ConfigError: naming the argument.
    """
    data = {**given, "randomness": given["randomness"] or {}, "env_cfg": given["env_cfg"] or {}}
    for key, model in (("auto_scale_lr", AutoScaleLR), ("randomness", Randomness), ("env_cfg", Environment)):
        if isinstance(data[key], Mapping):
            data[key] = validate(model, data[key], key)
    try:
        options = validate(FixedOptions, data, "runner")
    except ConfigError as error:
        raise ConfigError(str(error).removeprefix("runner.")) from None
    for key in ("load_from", "resume"):
        path = getattr(options, key)
        if isinstance(path, (str, Path)) and not Path(path).exists():
            raise ConfigError(f'{key}: "{path}" does not exist')
    if options.load_from is not None and isinstance(options.resume, (str, Path)):
        raise ConfigError("resume: names a checkpoint and load_from another, give one of them")
    return options


def check_model(model: Any) -> None:
    """A module, a configuration of one, or a function that gives one."""
    if isinstance(model, (Mapping, str)):
        MODELS.check(model, "model")
    elif not isinstance(model, nn.Module) and not callable(model):
        raise ConfigError(f"model: {type(model).__name__} is not allowed, give a module, dict(type=...), or a function")


def check_phase(name: str, **parts: Any) -> bool:
    """Whether the parts of train, val or test are given: all of them or none.

    Raises:
        ConfigError: naming a part that is missing.
    """
    given = [key for key, value in parts.items() if value is not None]
    missing = [key for key, value in parts.items() if value is None]
    if given and missing:
        raise ConfigError(f"{missing[0]}: missing, {' and '.join(given)} {'is' if len(given) == 1 else 'are'} given")
    return bool(given)


def check_train(train_dataloader: Any, train_cfg: Any, optim_wrapper: Any, param_scheduler: Any, model: Any) -> None:
    """Everything about training."""
    check_dataloader(train_dataloader, "train_dataloader")
    if not isinstance(train_cfg, Mapping):
        raise ConfigError(f"train_cfg: {train_cfg!r} is not allowed, give dict(by_epoch=True, max_epochs=...)")
    kind, kwargs = train_loop_class(train_cfg)
    check_call(kind, kwargs, "train_cfg", ("runner", "dataloader"))
    for key in ("max_epochs", "max_iters", "val_begin", "val_interval"):
        if kwargs.get(key, 1) < 1:
            raise ConfigError(f"train_cfg.{key}: {kwargs[key]} is not allowed, give 1 or more")
    sampler = train_dataloader.get("sampler") if isinstance(train_dataloader, Mapping) else train_dataloader.sampler
    sampler_type = sampler.get("type") if isinstance(sampler, Mapping) else sampler
    endless = sampler_type in ("InfiniteSampler", InfiniteSampler) or isinstance(sampler, InfiniteSampler)
    if endless and issubclass(kind, EpochBasedTrainLoop):
        raise ConfigError("train_cfg.by_epoch: an InfiniteSampler has no epochs, give by_epoch=False and max_iters")
    if (
        isinstance(param_scheduler, Mapping)
        and "type" not in param_scheduler
        and isinstance(optim_wrapper, OptimWrapperDict)
    ):
        for name, cfg in param_scheduler.items():
            if name not in optim_wrapper:
                raise ConfigError(f"param_scheduler.{name}: no optimizer has this name{suggest(name, optim_wrapper)}")
            check_param_schedulers(cfg, f"param_scheduler.{name}")
    else:
        check_param_schedulers(param_scheduler, "param_scheduler")
    if (
        isinstance(optim_wrapper, OptimWrapperDict)
        and isinstance(model, nn.Module)
        and not overrides(model, "train_step")
    ):
        raise ConfigError(
            f"optim_wrapper: has {len(optim_wrapper)} optimizers, {type(model).__name__} must define "
            "train_step(data, optim_wrapper) to say which is updated when"
        )


def train_loop_class(train_cfg: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The class of the training loop and its arguments."""
    kwargs = dict(train_cfg)
    by_epoch = kwargs.pop("by_epoch", None)
    if by_epoch is not None and not isinstance(by_epoch, bool):
        raise ConfigError(f"train_cfg.by_epoch: {by_epoch!r} is not allowed, give True or False")
    kind = kwargs.pop("type", None)
    if kind is not None:
        if by_epoch is not None:
            raise ConfigError("train_cfg.by_epoch: has no meaning beside train_cfg.type, give one of them")
        return LOOPS.get(kind, "train_cfg.type"), kwargs
    if by_epoch is None:
        by_epoch = "max_iters" not in kwargs
    for wrong, right in (("max_iters", "max_epochs"), ("max_epochs", "max_iters")):
        if wrong in kwargs and right == ("max_epochs" if by_epoch else "max_iters"):
            raise ConfigError(f"train_cfg.{wrong}: has no meaning with by_epoch={by_epoch}, give {right}")
    return (EpochBasedTrainLoop if by_epoch else IterBasedTrainLoop), kwargs


def check_evaluation(mode: str, dataloader: Any, cfg: Any, evaluator: Any) -> None:
    """Everything about validation or testing."""
    check_dataloader(dataloader, f"{mode}_dataloader")
    if not isinstance(cfg, Mapping):
        raise ConfigError(f"{mode}_cfg: {cfg!r} is not allowed, give dict()")
    kwargs = {key: value for key, value in cfg.items() if key != "type"}
    default = "ValLoop" if mode == "val" else "TestLoop"
    kind = LOOPS.get(cfg.get("type", default), f"{mode}_cfg.type")
    check_call(kind, kwargs, f"{mode}_cfg", ("runner", "dataloader", "evaluator"))
    check_evaluator(evaluator, f"{mode}_evaluator")


def resolve_hooks(default_hooks: Any, custom_hooks: Any) -> list[tuple[str, Any]]:
    """All hooks as (configuration key, hook or configuration); a default hook set to None is left out."""
    if default_hooks is not None and not isinstance(default_hooks, Mapping):
        raise ConfigError(
            f"default_hooks: {default_hooks!r} is not allowed, give a dict such as dict(checkpoint=dict(...))"
        )
    if custom_hooks is not None and not isinstance(custom_hooks, (list, tuple)):
        raise ConfigError(f"custom_hooks: {type(custom_hooks).__name__} is not allowed, give a list")
    hooks: dict[str, Any] = {f"default_hooks.{name}": cfg for name, cfg in DEFAULT_HOOKS.items()}
    for name, cfg in (default_hooks or {}).items():
        key = f"default_hooks.{name}"
        if name in DEFAULT_HOOKS and isinstance(cfg, Mapping) and "type" not in cfg:
            cfg = {**DEFAULT_HOOKS[name], **cfg}
        elif name not in DEFAULT_HOOKS and isinstance(cfg, Mapping) and "type" not in cfg:
            raise ConfigError(f"{key}: unknown key{suggest(name, DEFAULT_HOOKS)} or give it a type")
        hooks[key] = cfg
    resolved = [(key, cfg) for key, cfg in hooks.items() if cfg is not None]
    return resolved + [(f"custom_hooks[{i}]", cfg) for i, cfg in enumerate(custom_hooks or ())]


def check_hooks(hooks: list[tuple[str, Any]], validates: bool) -> None:
    """Types and arguments of all hooks, and whether what they wait for will come."""
    for key, cfg in hooks:
        if isinstance(cfg, Hook):
            continue
        bare = {k: v for k, v in cfg.items() if k != "priority"} if isinstance(cfg, Mapping) else cfg
        kind = HOOKS.check(bare, key)
        name = getattr(kind, "__name__", "")
        arguments = bare if isinstance(bare, Mapping) else {}
        if not validates and name == "CheckpointHook" and arguments.get("save_best"):
            raise ConfigError(f"{key}.save_best: needs validation, give val_dataloader, val_cfg and val_evaluator")
        if not validates and name == "EarlyStoppingHook":
            raise ConfigError(f"{key}: needs validation, give val_dataloader, val_cfg and val_evaluator")


def check_reporting(log_processor: Any, visualizer: Any, by_epoch: bool) -> None:
    """Log lines and reporters; these are built to be checked, which opens nothing."""
    build_log_processor(log_processor, by_epoch)
    build_reporters(visualizer)


def batch_size(dataloader: Any) -> int | None:
    """Samples per batch of a built dataloader; None when nobody knows."""
    if isinstance(dataloader, DataLoader):
        return dataloader.batch_size or getattr(dataloader.batch_sampler, "batch_size", None)
    return None
