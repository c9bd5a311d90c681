"""Build parts of a run that need its process group: environment, model, schedulers."""

from __future__ import annotations

import logging
import multiprocessing
import resource
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from ..core.errors import ConfigError
from ..core.hugging_face.pretrained import Pretrained
from ..core.model import BaseModel, overrides, parts_to_initialise
from ..core.registry import MODELS
from ..core.token_counts import count_tokens
from ..core.torch_private import is_compiled_wrapper
from ..core.tta_model import BaseTTAModel
from ..optim.schedulers import build_param_schedulers
from ..optim.wrapper import OptimWrapper
from ..optim.wrapper_dict import OptimWrapperDict
from ..strategies.base import NOTHING, Strategy
from .loops.train import TrainLoop
from .options import Environment

logger = logging.getLogger("flextrain")


def apply_environment(env: Environment) -> None:
    """Apply the process-wide settings of ``env_cfg``."""
    if env.mp_cfg.mp_start_method is not None:
        multiprocessing.set_start_method(env.mp_cfg.mp_start_method, force=True)
    if env.mp_cfg.opencv_num_threads is not None:
        _limit_opencv(env.mp_cfg.opencv_num_threads)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(env.resource_limit, soft), hard), hard))
    torch.backends.cudnn.benchmark = env.cudnn_benchmark


def _limit_opencv(threads: int) -> None:
    try:
        import cv2
    except ModuleNotFoundError:  # OpenCV is optional, but every MMEngine configuration has this key
        return
    cv2.setNumThreads(threads)


@contextmanager
def _reading_nothing() -> Iterator[None]:
    """Context that says so if a model reads weights where the strategy builds it without any."""
    # Some models are built in spite of it, and fail when their values are made.
    kind: Any = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    own = None if kind is None else vars(kind).get("from_pretrained")
    try:
        if own is not None:
            kind.from_pretrained = classmethod(_refuse_reading)
        yield
    except RuntimeError as error:  # StrategyError is one
        frames = traceback.walk_tb(error.__traceback__)
        if not any(frame.f_code.co_name == "from_pretrained" for frame, _ in frames):
            raise
        _refuse_reading(error=error)
    finally:
        if own is not None:
            kind.from_pretrained = own


def _refuse_reading(*given: Any, error: Exception | None = None, **options: Any) -> None:
    raise ConfigError(
        "model: from_pretrained reads weights, and this strategy builds a model without them; give "
        'dict(type="transformers:AutoModelForCausalLM", pretrained="folder"), with transforms=[...] for a model around it, or '
        "the model itself and no function"
    ) from error


def build_model(given: Any, preprocessor: Any, strategy: Strategy, *, for_training: bool) -> nn.Module:
    """Build the user's module from a module, a configuration or a function, in the strategy's ``init_context``."""
    if isinstance(given, nn.Module):
        _finish(given, preprocessor, strategy, for_training=for_training)
        return given
    if isinstance(given, Mapping) and preprocessor is not None:
        given, preprocessor = {"data_preprocessor": preprocessor, **given}, None
    reads_nothing = strategy.init_context() is not NOTHING

    def make() -> nn.Module:
        with _reading_nothing() if reads_nothing else NOTHING:
            if (pretrained := Pretrained.of(given, "model")) is not None:
                model: Any = pretrained.build()
            else:
                model = MODELS.build(given, "model") if isinstance(given, (Mapping, str)) else given()
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model: gave {type(model).__name__}, not a torch.nn.Module")
        return model

    finish = partial(_finish, preprocessor=preprocessor, strategy=strategy, for_training=for_training)
    return strategy.construct(make, finish)


def _finish(model: Any, preprocessor: Any, strategy: Strategy, *, for_training: bool) -> None:
    """Check a module, give it its preprocessor, and initialise it."""
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise ConfigError(
            f"model: is wrapped in {type(model).__name__}, give the model itself (model.module); the strategy wraps it"
        )
    if is_compiled_wrapper(model):
        raise ConfigError("model: is compiled already, give the model itself, and compile=True")
    if preprocessor is not None:
        owner = model.module if isinstance(model, BaseTTAModel) else model
        if not hasattr(owner, "data_preprocessor"):
            raise ConfigError(f"data_preprocessor: {type(owner).__name__} has no attribute of this name to set")
        is_built = isinstance(preprocessor, nn.Module)
        owner.data_preprocessor = preprocessor if is_built else MODELS.build(preprocessor, "data_preprocessor")
    # MMEngine calls init_weights, so only its kind of model expects that. Other models call such a method themselves.
    if for_training and isinstance(model, BaseModel):
        parts = [name for name, _ in parts_to_initialise(model)]
        if overrides(model, "init_weights"):
            strategy.init_weights(model)
        elif parts:
            logger.info(f"Calling init_weights() of the model's {', '.join(parts)}")
            strategy.init_weights(model)
    if for_training:
        count_tokens(model)


def scale_lr(optim: OptimWrapper | OptimWrapperDict, batch_size: int | None, shards: int, base: int) -> str:
    """Scale learning rates linearly with the samples per update, and return a description for the log.

    Source: Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", 2017.
    """
    if batch_size is None:
        raise ConfigError("auto_scale_lr: the batch size of train_dataloader is not known, scale the rate yourself")
    real = batch_size * shards * optim.accumulate
    for group in optim.param_groups:
        group["lr"] *= real / base
    return f"Learning rates times {real / base:.4g}: {real} samples per update, chosen for {base}"


def build_schedulers(given: Any, optim: OptimWrapper | OptimWrapperDict, loop: TrainLoop) -> dict[str, list[Any]]:
    """Build the parameter schedulers of each optimizer, by its name; ``given`` is for all, or a dict by name."""
    by_name = isinstance(given, Mapping) and "type" not in given
    return {
        name: build_param_schedulers(
            given.get(name) if by_name and name else given,
            wrapper,
            epoch_length=loop.data.epoch_length,
            max_epochs=loop.max_epochs if loop.by_epoch else None,
            max_iters=loop.max_iters,
            where=f"param_scheduler.{name}" if by_name and name else "param_scheduler",
        )
        for name, wrapper in optim.wrappers.items()
    }
