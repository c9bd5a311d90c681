"""BaseModel with MMEngine's calling convention, and functions that tell how to call any other module."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .device import to_device
from .errors import ConfigError
from .registry import MODELS
from .torch_private import DeviceFollower

_logger = logging.getLogger("flextrain")


class Updates(Protocol):
    """The methods of an OptimWrapper that ``train_step`` calls."""

    def optim_context(self, model: nn.Module) -> AbstractContextManager[None]:
        """Context for the forward pass."""

    def update_params(self, loss: Tensor) -> None:
        """Run backward, and the update when the accumulation window is complete."""


@MODELS.register_module()
class BaseDataPreprocessor(DeviceFollower):
    """Moves a batch to the model's device. Subclass it for normalisation or augmentation on the device.

    Args:
        non_blocking: copy asynchronously; this is only faster from pinned memory.
    """

    def __init__(self, non_blocking: bool = True) -> None:
        super().__init__()
        self.non_blocking = non_blocking

    def cast_data(self, data: Any) -> Any:
        """``data`` with its tensors on this module's device."""
        return to_device(data, self.device, self.non_blocking)

    def forward(self, data: Any, training: bool = False) -> Any:
        """Return the model's input for a batch of the dataloader."""
        return self.cast_data(data)


class BaseModel(nn.Module):
    """A module with ``forward(*inputs, mode)``, as in MMEngine.

    Mode "loss" returns a dict of losses, "predict" the predictions for metrics, "tensor" raw output. Subclassing is
    optional: any module can be trained whose forward takes ``mode``, or returns something with a ``loss``.

    Args:
        data_preprocessor: a module, or ``dict(type=...)``; default: BaseDataPreprocessor.
        init_cfg: MMEngine's, not supported; initialise in the constructor, or override ``init_weights``.
    """

    def __init__(self, data_preprocessor: dict[str, Any] | nn.Module | None = None, init_cfg: None = None) -> None:
        super().__init__()
        if init_cfg is not None:
            raise ConfigError("model.init_cfg: has no meaning here, initialise in __init__ or override init_weights()")
        given = data_preprocessor or BaseDataPreprocessor()
        built = given if isinstance(given, nn.Module) else MODELS.build(given, "model.data_preprocessor")
        self.data_preprocessor: nn.Module = built

    def init_weights(self) -> None:
        """Initialise parameters; called once, before training. Default: call ``init_weights()`` of the submodules.

        Submodules with weights of their own or their own initialisation, such as models of transformers and timm, are
        left unchanged.
        """
        for _, part in parts_to_initialise(self):
            part.init_weights()

    def forward(self, *args: Any, mode: str = "tensor", **kwargs: Any) -> Any:
        """Losses, predictions or raw output, depending on ``mode``; every model must define it."""
        raise NotImplementedError(f"{type(self).__name__}.forward(..., mode) is not defined")

    def train_step(self, data: Any, optim_wrapper: Updates) -> dict[str, Tensor]:
        """Train on one micro-batch: forward, backward and, at the end of the accumulation window, the update."""
        with optim_wrapper.optim_context(self):
            data = self.data_preprocessor(data, True)
            losses = self._run_forward(data, mode="loss")
        loss, log_vars = self.parse_losses(losses)
        optim_wrapper.update_params(loss)
        return log_vars

    def val_step(self, data: Any) -> Any:
        """Predictions for one batch of validation data."""
        return self._run_forward(self.data_preprocessor(data, False), mode="predict")

    def test_step(self, data: Any) -> Any:
        """Predictions for one batch of test data."""
        return self._run_forward(self.data_preprocessor(data, False), mode="predict")

    def parse_losses(self, losses: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        """The total loss for backward, and the values to log; see ``flextrain.core.model.parse_losses``."""
        return parse_losses(losses)

    def _run_forward(self, data: Any, mode: str) -> Any:
        return run_forward(self, data, mode=mode)


_BASE_MODELS: list[type[nn.Module]] = [BaseModel]


def add_base_model(kind: type[nn.Module]) -> None:
    """Treat subclasses of another package's base model as those of BaseModel.

    Its own ``train_step``, ``val_step``, ``test_step``, ``_run_forward`` and ``parse_losses`` must do what BaseModel's do.
    Only what a subclass overrides is called then; everything else is left to the loop.
    """
    if kind not in _BASE_MODELS:
        _BASE_MODELS.append(kind)


def is_base_model(kind: type) -> bool:
    """Whether a class is derived from BaseModel, or from a base model that was added."""
    return issubclass(kind, tuple(_BASE_MODELS))


def parts_to_initialise(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The outermost submodules, by name, whose ``init_weights()`` BaseModel's default calls, as in MMEngine."""
    for name, child in module.named_children():
        if is_called := _initialises(child):
            yield prefix + name, child
        elif is_called is None:
            yield from parts_to_initialise(child, f"{prefix}{name}.")


def _initialises(module: nn.Module) -> bool | None:
    """Whether to call the module's ``init_weights()``; None: ask its submodules."""
    if any(hasattr(module, name) for name in _OF_MODELS_WITH_WEIGHTS):
        return False
    if is_base_model(type(module)):
        return overrides(module, "init_weights") or None
    method = getattr(module, "init_weights", None)
    if not callable(method):
        return None
    required = (
        p for p in inspect.signature(method).parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    )
    return None if any(p.default is p.empty for p in required) else True  # required arguments: it is for apply()


# Attributes of models of transformers and timm, whose ``init_weights()`` would overwrite loaded weights.
_OF_MODELS_WITH_WEIGHTS = ("from_pretrained", "pretrained_cfg")


def run_forward(model: Callable[..., Any], data: Any, **kwargs: Any) -> Any:
    """Call ``model`` with a dict as keyword arguments, a list or tuple as positional ones, any other value as one."""
    if isinstance(data, (list, tuple)):
        return model(*data, **kwargs)
    if isinstance(data, Mapping):
        return model(**data, **kwargs)
    return model(data, **kwargs)


def class_name(module: nn.Module) -> str:
    """The name of the user's class: FSDP replaces a module's class by one of its own, ``FSDPNet`` for ``Net``."""
    kinds = type(module).__mro__
    return next((kind for kind in kinds if not kind.__module__.startswith("torch.distributed.")), kinds[0]).__name__


def takes_mode(module: nn.Module) -> bool:
    """Whether the module's forward has a parameter ``mode``; if it takes ``**kwargs``, its base class's decides."""
    for owner in (module, *type(module).__mro__):
        forward = vars(owner).get("forward")
        if forward is None:
            continue
        parameters = inspect.signature(forward).parameters
        if "mode" in parameters:
            return True
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            return False
    return False


def has_forward(module: nn.Module) -> bool:
    """Whether the module defines forward, in its class or as an attribute of its own."""
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def overrides(module: nn.Module | type[nn.Module], name: str) -> bool:
    """Whether the module, or class of modules, defines a method ``name`` that is not BaseModel's or an added one's."""
    if not isinstance(module, type) and callable(vars(module).get(name)):
        return True
    found = getattr(module if isinstance(module, type) else type(module), name, None)
    return callable(found) and all(found is not getattr(base, name, None) for base in _BASE_MODELS)


def own_run_forward(module: nn.Module) -> Callable[[Any, str], Any] | None:
    """A subclass's own ``_run_forward(data, mode)``, which may call the model in any way; None for BaseModel's."""
    if is_base_model(type(module)) and overrides(module, "_run_forward"):
        return module._run_forward  # type: ignore[return-value]
    return None


def calls_itself(module: nn.Module | type[nn.Module]) -> str | None:
    """Name of the overridden method in which a model, or class of models, calls itself.

    A wrapper of such a model cannot be called. None if the loop calls the model as a whole.
    """
    kind = module if isinstance(module, type) else type(module)
    names = ("train_step", "_run_forward") if is_base_model(kind) else ("train_step",)
    return next((name for name in names if overrides(module, name)), None)


NO_LOSS = "no key contains 'loss'; those that do are summed: a tensor counts by its mean, a list of tensors by the sum of means"
"""What a result lacks that is no loss, for messages."""


def parse_losses(losses: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """The sum of all values whose name contains "loss", and all values as 0-dim tensors to log, "loss" first.

    A value is a tensor (its mean is taken) or a sequence of tensors (the sum of their means).

    Raises:
        ConfigError: no dict, a value of another type, or no name that contains "loss".
    """
    if type(losses) is not dict and not isinstance(losses, Mapping):
        raise ConfigError(f"model: forward(mode='loss') gave {type(losses).__name__}, give a dict of losses")
    only = losses.get("loss") if len(losses) == 1 else None
    if isinstance(only, Tensor) and only.dim() == 0:  # fast path: most models return this
        return only, {"loss": only}
    values: dict[str, Tensor] = {}
    for name, value in losses.items():
        if isinstance(value, Tensor):
            values[name] = value if value.dim() == 0 else _mean(name, value)
        elif isinstance(value, Sequence) and value and all(isinstance(item, Tensor) for item in value):
            values[name] = torch.stack([item.mean() for item in value]).sum()
        else:
            raise ConfigError(f"model: loss {name!r} is {type(value).__name__}, give a tensor or a list of tensors")
    parts = [value for name, value in values.items() if "loss" in name]
    if not parts:
        raise ConfigError(f"model: gave {', '.join(map(repr, values)) or 'nothing'}, and {NO_LOSS}")
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total, {"loss": total, **{name: value for name, value in values.items() if name != "loss"}}


def _mean(name: str, value: Tensor) -> Tensor:
    """The mean of a loss with dimensions; the first of each name in a run is logged, because a sum may be meant."""
    if name not in _averaged:
        _averaged.add(name)
        _logger.warning(
            f'model: loss "{name}" is no scalar but of shape {tuple(value.shape)} (reduction="none"?), its mean is taken; '
            "give a scalar to choose mean or sum"
        )
    return value.mean()


_averaged: set[str] = set()


def forget_averaged() -> None:
    """Log the first loss with dimensions of each name again: another run begins."""
    _averaged.clear()
