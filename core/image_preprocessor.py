"""ImgDataPreprocessor: normalises pictures on the device and pads them to one size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .errors import ConfigError
from .model import BaseDataPreprocessor
from .registry import MODELS

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
