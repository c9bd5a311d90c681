"""Checks of the runner's arguments that need no process group and no model."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..core.checkpoint.untrusted import one_line
from ..core.config import check_call
from ..core.errors import ConfigError, suggest
from ..core.foreign_classes import refuse_foreign
from ..core.hugging_face.pretrained import Pretrained
from ..core.model import overrides
from ..core.registry import LOOPS, MODELS
from ..core.tta_model import BaseTTAModel
from ..optim.schedulers import check_param_schedulers
from ..optim.wrapper_dict import OptimWrapperDict
from .data.checks import check_dataloader, is_infinite, loader_and_shard
from .data.user_loaders import batch_size
from .loops.base import BaseLoop
from .loops.epoch import EpochBasedTrainLoop
from .loops.iteration import IterBasedTrainLoop
from .loops.train import TrainLoop
from .metrics.evaluator import check_evaluator
from .options import FixedOptions
from .reporting import build_log_processor, check_log_level

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
    refuse = _take if takes_mmengines else _refuse_model
    if isinstance(data_preprocessor, (Mapping, str, type)):
        must_be(MODELS.check(data_preprocessor, where), nn.Module, f"{where}.type", "torch.nn.Module")
    elif data_preprocessor is not None and not isinstance(data_preprocessor, nn.Module):
        raise ConfigError(f"{where}: {data_preprocessor!r} is not allowed, give a module or dict(type=...)")
    if (pretrained := Pretrained.of(model, "model")) is not None:
        if data_preprocessor is not None or where in model:
            raise ConfigError(f"{where}: {pretrained.name} takes none")
    elif isinstance(model, (Mapping, str)):
        kind = MODELS.check(model, "model")
        refuse(kind)
        must_be(kind, nn.Module, "model.type", "torch.nn.Module")
        if data_preprocessor is not None and where not in model:
            with_preprocessor = {**(model if isinstance(model, Mapping) else {"type": model}), where: data_preprocessor}
            try:
                MODELS.check(with_preprocessor, "model")
            except ConfigError:
                raise ConfigError(f"{where}: {kind.__name__} takes none") from None
    elif isinstance(model, nn.Module):
        refuse(model)
        if data_preprocessor is not None and not hasattr(model, where):
            raise ConfigError(f"{where}: {type(model).__name__} has no attribute of this name to set")
    elif callable(model):
        refuse(model)
        check_call(model, {}, "model")
        must_be(model, nn.Module, "model", "torch.nn.Module")
    else:
        raise ConfigError(f"model: {type(model).__name__} is not allowed, give a module, dict(type=...), or a function")


def _refuse_model(model: Any) -> None:
    """Raise ConfigError for MMEngine's BaseModel; its other modules are called as any other."""
    refuse_foreign(model, "model", "flextrain.BaseModel", within="mmengine.model.base_model")


def _take(model: Any) -> None:
    """Refuse nothing."""


def must_be(kind: Any, base: type, where: str, what: str) -> None:
    """Raise ConfigError if a class is not derived from ``base``; the result of a function can only be checked later."""
    if inspect.isclass(kind) and not issubclass(kind, base):
        raise ConfigError(f"{where}: {kind.__name__} is no {what}")


def check_phase(name: str, **parts: Any) -> bool:
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
) -> None:
    """Check the arguments of training."""
    check_dataloader(train_dataloader, "train_dataloader")
    train_dataloader, _ = loader_and_shard(train_dataloader)
    kind, kwargs = train_loop_class(train_cfg)
    check_call(kind, kwargs, "train_cfg", ("runner", "dataloader"))
    is_built = not isinstance(train_dataloader, Mapping)
    sampler = getattr(train_dataloader, "sampler", None) if is_built else train_dataloader.get("sampler")
    if sampler is not None and is_infinite(sampler) and issubclass(kind, EpochBasedTrainLoop):
        raise ConfigError("train_cfg.by_epoch: an InfiniteSampler has no epochs, give by_epoch=False and max_iters")
    size = batch_size(train_dataloader) if is_built else train_dataloader.get("batch_size", 1)
    if scales_lr and size is None and (is_built or train_dataloader.get("batch_sampler") is None):
        raise ConfigError("auto_scale_lr: the batch size of train_dataloader is not known, scale the rate yourself")
    _check_schedulers(param_scheduler, optim_wrapper, kind.by_epoch, kwargs.get("max_epochs"), validates)
    if isinstance(optim_wrapper, OptimWrapperDict):
        found = model_class(model)
        if found is not None and not overrides(found, "train_step"):
            name = found.__name__ if isinstance(found, type) else type(found).__name__
            raise ConfigError(
                f"optim_wrapper: has {len(optim_wrapper)} optimizers, {name} must define "
                "train_step(data, optim_wrapper) to say which is updated when"
            )


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


_COUNTS = ("max_epochs", "max_iters", "val_begin", "val_interval")


def _whole(value: Any) -> Any:
    """Return a float that is whole, such as 1e5, as an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def train_loop_class(train_cfg: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the class of the training loop, and its arguments."""
    if not isinstance(train_cfg, Mapping):
        raise ConfigError(f"train_cfg: {train_cfg!r} is not allowed, give dict(by_epoch=True, max_epochs=...)")
    kwargs = {name: _whole(value) if name in _COUNTS else value for name, value in train_cfg.items()}
    by_epoch = kwargs.pop("by_epoch", None)
    if by_epoch is not None and not isinstance(by_epoch, bool):
        raise ConfigError(f"train_cfg.by_epoch: {by_epoch!r} is not allowed, give True or False")
    kind = kwargs.pop("type", None)
    if kind is not None:
        if by_epoch is not None:
            raise ConfigError("train_cfg.by_epoch: has no meaning beside train_cfg.type, give one of them")
        loop = LOOPS.resolve(kind, "train_cfg.type")
        refuse_foreign(loop, "train_cfg.type", "flextrain.runner.loops.train.TrainLoop", LOOPS)
        if inspect.isclass(loop) and not issubclass(loop, TrainLoop):
            raise ConfigError(
                f"train_cfg.type: {loop.__name__} is no training loop; subclass EpochBasedTrainLoop or IterBasedTrainLoop, "
                "which count for checkpoints and schedules, and define run_iter, run_epoch or run"
            )
        return loop, kwargs
    if by_epoch is None:
        if kwargs.get("max_iters") is not None and kwargs.get("max_epochs") is not None:
            raise ConfigError("train_cfg.max_iters: max_epochs is given too, keep one of them")
        by_epoch = "max_iters" not in kwargs
    for wrong, right in (("max_iters", "max_epochs"), ("max_epochs", "max_iters")):
        if wrong in kwargs and right == ("max_epochs" if by_epoch else "max_iters"):
            raise ConfigError(f"train_cfg.{wrong}: has no meaning with by_epoch={by_epoch}, give {right}")
    return (EpochBasedTrainLoop if by_epoch else IterBasedTrainLoop), kwargs


def check_evaluation(mode: str, dataloader: Any, cfg: Any, evaluator: Any) -> None:
    """Check the arguments of validation or testing."""
    check_dataloader(dataloader, f"{mode}_dataloader", training=False)
    kind, kwargs = eval_loop_class(cfg, mode)
    check_call(kind, kwargs, f"{mode}_cfg", ("runner", "dataloader", "evaluator"))
    check_evaluator(evaluator, f"{mode}_evaluator")


def eval_loop_class(cfg: Mapping[str, Any], mode: str) -> tuple[Any, dict[str, Any]]:
    """Return the class of the loop of validation or testing, and its arguments."""
    if not isinstance(cfg, Mapping):
        raise ConfigError(f"{mode}_cfg: {cfg!r} is not allowed, give dict()")
    where = f"{mode}_cfg.type"
    kind = LOOPS.resolve(cfg.get("type", "ValLoop" if mode == "val" else "TestLoop"), where)
    refuse_foreign(kind, where, "flextrain.BaseLoop", LOOPS)
    if inspect.isclass(kind):
        must_be(kind, BaseLoop, where, "evaluation loop")
        if issubclass(kind, TrainLoop):
            raise ConfigError(f"{where}: {kind.__name__} is no evaluation loop")
        parameters = inspect.signature(kind).parameters.values()
        if not any(p.name == "evaluator" or p.kind is p.VAR_KEYWORD for p in parameters):
            raise ConfigError(f"{where}: {kind.__name__} takes no evaluator; take runner, dataloader and evaluator")
    return kind, {key: value for key, value in cfg.items() if key != "type"}


def check_logging(log_processor: Any, log_level: Any, by_epoch: bool) -> None:
    """Check the arguments of logging; a log processor is built for the check."""
    check_log_level(log_level)
    build_log_processor(log_processor, by_epoch)
