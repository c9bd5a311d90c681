"""MMEngine's base classes of models: BaseModel, its preprocessors, and BaseTTAModel."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..base.errors import ConfigError
from ..base.overriding import overridden
from ..base.registry import MODELS
from ..device.device import to_device
from ..torch_compat.torch_private import DeviceFollower

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
        """The total loss for backward, and the values to log; see ``flextrain.core.model.base_model.parse_losses``."""
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
    return _sum_of_parts(losses)


def _sum_of_parts(losses: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
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


# ImgDataPreprocessor: normalises pictures on the device and pads them to one size.


_WHERE = "data_preprocessor"


@MODELS.register_module()
class ImgDataPreprocessor(BaseDataPreprocessor):
    """Makes the model's input from pictures, on its device: channels swapped, float32, normalised, padded, stacked.

    A batch is a dict whose ``inputs`` is a tensor of shape (batch, channels, height, width), or a list of tensors of shape
    (channels, height, width) of any size. The result has a tensor in its place, and ``data_samples`` (default: None). The
    interface is that of MMEngine's class of this name.

    Args:
        mean, std: one number, or one for each of three channels, in the order after swapping; None: no normalisation.
        pad_size_divisor: height and width become multiples of it, by padding below and on the right.
        pad_value: value of padding, after normalisation.
        bgr_to_rgb, rgb_to_bgr: reverse the order of three channels.
        non_blocking: copy to the device asynchronously; this is only faster from pinned memory.

    Raises:
        ConfigError: only one of ``mean`` and ``std`` is given, or another number of values.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        pad_size_divisor: int = 1,
        pad_value: float = 0,
        bgr_to_rgb: bool = False,
        rgb_to_bgr: bool = False,
        non_blocking: bool = True,
    ) -> None:
        super().__init__(non_blocking)
        if bgr_to_rgb and rgb_to_bgr:
            raise ConfigError(f"{_WHERE}.rgb_to_bgr: bgr_to_rgb is given too, and both swap, give one of them")
        if (mean is None) != (std is None):
            raise ConfigError(f"{_WHERE}.{'mean' if mean is None else 'std'}: missing, give both mean and std")
        for name, values in (("mean", mean), ("std", std)):
            if values is None:
                continue
            if len(values) not in (1, 3):
                raise ConfigError(f"{_WHERE}.{name}: {len(values)} values are not allowed, give 1 or 3")
            self.register_buffer(name, torch.tensor(values, dtype=torch.float32).view(-1, 1, 1), persistent=False)
        if pad_size_divisor < 1:
            raise ConfigError(f"{_WHERE}.pad_size_divisor: {pad_size_divisor} is not allowed, give 1 or more")
        self.normalizes, self.swaps = mean is not None, bgr_to_rgb or rgb_to_bgr
        self.pad_size_divisor, self.pad_value = pad_size_divisor, pad_value

    def forward(self, data: Any, training: bool = False) -> Any:
        """Return the model's input for a batch of the dataloader."""
        data = self.cast_data(data)
        if not isinstance(data, Mapping) or "inputs" not in data:
            raise ConfigError(f"{_WHERE}: got {_what(data)}, its dataset has to give dicts with inputs")
        inputs = data["inputs"]
        if isinstance(inputs, Tensor) and inputs.dim() == 4:
            height, width = (self._padded(size) for size in inputs.shape[2:])
            batch = functional.pad(
                self._normalized(inputs),
                (0, width - inputs.shape[3], 0, height - inputs.shape[2]),
                value=self.pad_value,
            )
        elif isinstance(inputs, Sequence) and inputs and all(isinstance(x, Tensor) and x.dim() == 3 for x in inputs):
            batch = stack_batch(
                [self._normalized(picture) for picture in inputs], self.pad_size_divisor, self.pad_value
            )
        else:
            raise ConfigError(
                f"{_WHERE}: inputs is {_what(inputs)}, give a tensor (batch, channels, height, width) or a list of tensors "
                "(channels, height, width)"
            )
        return {"data_samples": None, **data, "inputs": batch}

    def _normalized(self, pictures: Tensor) -> Tensor:
        channels = pictures.shape[-3]
        if channels != 3 and (self.swaps or (self.normalizes and len(self.mean) == 3)):
            raise ConfigError(f"{_WHERE}: a picture has {channels} channels, and the settings are for 3")
        if self.swaps:
            pictures = pictures.flip(-3)
        pictures = pictures.float()
        return (pictures - self.mean) / self.std if self.normalizes else pictures

    def _padded(self, size: int) -> int:
        return _multiple(size, self.pad_size_divisor)


def stack_batch(tensor_list: Sequence[Tensor], pad_size_divisor: int = 1, pad_value: float = 0) -> Tensor:
    """Return tensors of shape (channels, height, width, ...) as one of shape (batch, channels, ...), padded at the ends.

    Args:
        tensor_list: one or more tensors with equal dtypes and channels.
        pad_size_divisor: all dimensions except channels become multiples of it.
        pad_value: value of padding.
    """
    if not tensor_list or len({(tensor.dim(), tensor.shape[:1]) for tensor in tensor_list}) > 1:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensor_list) or "nothing"
        raise ConfigError(f"stack_batch: got {shapes}, give tensors with equal channels and numbers of dimensions")
    first = tensor_list[0]
    sizes = [max(each) for each in zip(*(tensor.shape[1:] for tensor in tensor_list), strict=True)]
    shape = [_multiple(size, pad_size_divisor) for size in sizes]
    batch = first.new_full((len(tensor_list), first.shape[0], *shape), pad_value)
    for target, tensor in zip(batch, tensor_list, strict=True):
        filled = (slice(None), *map(slice, tensor.shape[1:]))
        target[filled] = tensor
    return batch


def _multiple(size: int, divisor: int) -> int:
    return -(-size // divisor) * divisor


def _what(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a dict of {', '.join(map(str, value)) or 'nothing'}"
    return f"a {type(value).__name__}"


# BaseTTAModel: tests a model with several augmentations of every sample (test-time augmentation).


class BaseTTAModel(BaseModel):
    """Predicts every augmentation of a batch with the model inside, and merges what belongs to one sample.

    A batch for testing is a dict, list or tuple whose fields are lists with one entry for each augmentation, as
    ``pseudo_collate`` makes of samples with such lists. All batches have equally many augmentations.

    In a run the strategy has the model inside: it is wrapped, sharded and loaded as without this class, and names in
    checkpoints have no prefix. Validation uses it alone.

    Args:
        module: the model, or ``dict(type=...)``.
        data_preprocessor: for a model that is given as a configuration; otherwise it replaces the model's.

    Raises:
        ConfigError: ``module`` is no module, or a data preprocessor is given for one that has none.
    """

    def __init__(
        self,
        module: nn.Module | dict[str, Any],
        data_preprocessor: dict[str, Any] | nn.Module | None = None,
        *,
        where: str = "model",
    ) -> None:
        super().__init__()
        if isinstance(module, Mapping) and data_preprocessor is not None:
            module = {**module, "data_preprocessor": data_preprocessor}
        built: Any = MODELS.build(module, f"{where}.module") if isinstance(module, (Mapping, str)) else module
        if not isinstance(built, nn.Module):
            raise ConfigError(f"{where}.module: {type(built).__name__} is not allowed, give a module or dict(type=...)")
        if not isinstance(module, Mapping) and data_preprocessor is not None:
            if not hasattr(built, "data_preprocessor"):
                raise ConfigError(
                    f"{where}.data_preprocessor: {type(built).__name__} has no attribute of this name to set"
                )
            own: Any = data_preprocessor
            is_built = isinstance(own, nn.Module)
            built.data_preprocessor = own if is_built else MODELS.build(own, f"{where}.data_preprocessor")
        self.module = built
        self._predict_in_run: Callable[[Any], Any] | None = None

    def merge_preds(self, data_samples_list: list[tuple[Any, ...]]) -> Any:
        """Return the predictions that metrics get; every subclass must define it.

        Args:
            data_samples_list: for each sample of the batch, its predictions by augmentation.
        """
        raise NotImplementedError(f"{type(self).__name__}.merge_preds(data_samples_list) is not defined")

    def test_step(self, data: Any) -> Any:
        """Return the merged predictions of a batch of augmented samples; None on processes without outputs.

        Raises:
            ConfigError: a field of the batch is no list, or has more or fewer entries than another; or the model does not
                predict each sample of the batch.
        """
        predictions = [self._predict(part) for part in augmentations(data)]
        if any(found is None for found in predictions):
            return None
        by_sample = [_by_sample(found) for found in predictions]
        if len({len(samples) for samples in by_sample}) != 1:
            raise ConfigError(
                f"model.module: {type(self.module).__name__} predicted {[len(samples) for samples in by_sample]} samples of "
                "the augmentations of one batch, give equally many"
            )
        return self.merge_preds(list(zip(*by_sample, strict=True)))

    def run_with(self, predict: Callable[[Any], Any] | None) -> None:
        """Predict with this function from now on; None: with the model inside."""
        self._predict_in_run = predict

    def _predict(self, data: Any) -> Any:
        if self._predict_in_run is not None:
            return self._predict_in_run(data)
        if callable(getattr(self.module, "test_step", None)):
            return self.module.test_step(data)  # type: ignore[operator]
        return run_forward(self.module, data, **({"mode": "predict"} if takes_mode(self.module) else {}))


def overrides_test_step(model: BaseTTAModel) -> bool:
    """Whether a subclass defines ``test_step`` anew, and so may call the model inside itself."""
    return bool(overridden(model, "test_step"))


def module_to_set_up(model: nn.Module, *, trains: bool) -> nn.Module:
    """Return the module that a strategy gets of a model: of a BaseTTAModel, the model inside.

    Raises:
        ConfigError: a BaseTTAModel is to be trained, or has weights of its own.
    """
    if not isinstance(model, BaseTTAModel):
        return model
    if trains:
        raise not_trainable(type(model))
    if not overridden(model, "merge_preds", "test_step"):
        raise ConfigError(f"model: {type(model).__name__}.merge_preds(data_samples_list) is not defined")
    tensors = (*model.named_parameters(), *model.named_buffers())
    if any(not name.startswith("module.") for name, _ in tensors):
        raise ConfigError(
            f"model: {type(model).__name__} has weights beside its module, which no strategy would place and no checkpoint "
            "contain; put them into the module"
        )
    return model.module


def not_trainable(kind: type) -> ConfigError:
    """Return the error of training with a BaseTTAModel."""
    return ConfigError(
        f"model: {kind.__name__} merges predictions in testing and cannot be trained, train its module; "
        f'custom_hooks=[dict(type="PrepareTTAHook", tta_cfg=dict(type=...))] tests what was trained'
    )


def augmentations(data: Any) -> list[Any]:
    """Return a batch for each augmentation, from a batch whose fields are lists of augmentations.

    Raises:
        ConfigError: a field is no list, or the fields have different lengths.
    """
    if isinstance(data, Mapping):
        fields = {repr(key): value for key, value in data.items()}
    elif isinstance(data, (list, tuple)):
        fields = {f"number {i}": value for i, value in enumerate(data)}
    else:
        raise ConfigError(
            f"test_dataloader: gave {type(data).__name__}, BaseTTAModel needs a dict, list or tuple of fields"
        )
    lengths: dict[str, int] = {}
    for name, value in fields.items():
        if not isinstance(value, (list, tuple)):
            raise ConfigError(
                f"test_dataloader: field {name} of a batch is {type(value).__name__}, BaseTTAModel needs a list with an entry "
                "for each augmentation"
            )
        lengths[name] = len(value)
    if len(set(lengths.values())) != 1:
        counts = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise ConfigError(f"test_dataloader: fields of a batch have different numbers of augmentations ({counts})")
    if isinstance(data, Mapping):
        return [{key: value[i] for key, value in data.items()} for i in range(next(iter(lengths.values())))]
    return [list(part) for part in zip(*data, strict=True)]


def _by_sample(predictions: Any) -> list[Any]:
    """Return predictions as a list of samples; a dict of batches becomes a dict for each sample."""
    if isinstance(predictions, Mapping):
        sizes = {len(value) if _has_length(value) else None for value in predictions.values()}
        if len(sizes) != 1 or None in sizes:
            raise ConfigError(
                "model.module: predicted a dict, whose values need one entry for each sample to merge augmentations; give a "
                "list of samples"
            )
        return [dict(zip(predictions, row, strict=True)) for row in zip(*predictions.values(), strict=True)]
    if not isinstance(predictions, (list, tuple, Tensor)) or (
        isinstance(predictions, Tensor) and not predictions.dim()
    ):
        raise ConfigError(
            f"model.module: predicted {type(predictions).__name__}, to merge augmentations give a list of samples"
        )
    return list(predictions)


def _has_length(value: Any) -> bool:
    return value.dim() > 0 if isinstance(value, Tensor) else isinstance(value, Sized)
