"""Precision that an OptimWrapper requests, a report of the dtypes in use, and casting of modules and tensors."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..base.errors import ConfigError, StrategyError, one_of
from ..base.trees import map_tensors
from ..torch_compat.torch_private import BATCH_NORM_BASE, NORM_BASE


@contextmanager
def exact_float32() -> Iterator[None]:
    """Context in which products of float32 have all digits. TF32 has three of them, and convolutions use it unless told otherwise."""
    cudnn: Any = torch.backends.cudnn
    try:
        before = [(cudnn, "allow_tf32", cudnn.allow_tf32)]
    except RuntimeError:  # convolutions and recurrent layers have been given switches of their own
        before = [(each, "fp32_precision", each.fp32_precision) for each in (cudnn.conv, cudnn.rnn)]
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        for owner, name, value in before:
            setattr(owner, name, value)


# Find normalisation layers and their running statistics.


NORMS = (NORM_BASE, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, nn.LocalResponseNorm)
"""All normalisation layers of torch; NORM_BASE has batch and instance normalisation, also synchronised and lazy."""

BATCH_NORM = BATCH_NORM_BASE
"""Base class of the layers that normalise over the samples of a batch."""


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a normalisation layer."""
    return isinstance(module, NORMS)


def acts_as_norm(module: nn.Module) -> bool:
    """Whether a module is a normalisation layer of torch, or one of somebody's own such as LlamaRMSNorm or T5LayerNorm.

    One's own is known by its class: "Norm" is in its name, and each parameter it holds itself has at most one dimension.
    """
    if is_norm(module):
        return True
    own = list(module.parameters(recurse=False))
    return bool(own) and "Norm" in type(module).__name__ and all(parameter.dim() <= 1 for parameter in own)


def running_statistics(module: nn.Module) -> dict[str, Tensor]:
    """The buffers, by name, that forward changes in training: statistics of batch and instance normalisation."""
    return {
        name: buffer
        for prefix, part in module.named_modules()
        if isinstance(part, NORM_BASE) and part.track_running_stats
        for name, buffer in part.named_buffers(prefix, recurse=False)
    }


DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "float16": torch.float16,
    "fp16": torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
}


def to_dtype(value: str | torch.dtype, where: str) -> torch.dtype:
    """The dtype that a configuration names, such as "bfloat16"."""
    if isinstance(value, torch.dtype):
        return value
    if value not in DTYPES:
        raise ConfigError(f'{where}: "{value}" is not allowed, choose {one_of(DTYPES)}')
    return DTYPES[value]


@dataclass(frozen=True)
class Precision:
    """The precision that an OptimWrapper requests and a Strategy implements.

    Attributes:
        compute: dtype of the arithmetic in forward and backward; None: the device's default for autocast.
        reduce: dtype in which gradients are reduced over processes; None: that of the gradients.
        loss_scale: "dynamic" or a factor, for float16; None: no loss scaling.
    """

    compute: torch.dtype | None = torch.float32
    reduce: torch.dtype | None = None
    loss_scale: float | Literal["dynamic"] | None = None

    @property
    def autocast(self) -> bool:
        """Whether forward runs under torch.autocast, because it computes in another dtype than the parameters'."""
        return self.compute is not torch.float32


@dataclass(frozen=True)
class PrecisionReport:
    """The dtypes in use after set-up, read from the tensors; an empty tuple: there are no such tensors.

    Attributes:
        compute: dtypes of forward and backward.
        parameters: of the trainable parameters.
        masters: of the master copies that the optimizer updates instead of the parameters.
        gradients: in which gradients are reduced.
        optimizer_state: of moments and other optimizer state, known after the first update.
    """

    compute: tuple[torch.dtype, ...]
    parameters: tuple[torch.dtype, ...]
    masters: tuple[torch.dtype, ...]
    gradients: tuple[torch.dtype, ...]
    optimizer_state: tuple[torch.dtype, ...] = ()

    def __str__(self) -> str:
        parts = []
        for field in fields(self):
            found = getattr(self, field.name)
            if found:
                names = "/".join(str(dtype).removeprefix("torch.") for dtype in found)
                parts.append(f"{field.name.replace('_', ' ')} {names}")
        return ", ".join(parts)


def dtypes(tensors: Any) -> tuple[torch.dtype, ...]:
    """The floating-point dtypes that occur, sorted by name."""
    found = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    return tuple(sorted(found, key=str))


def output_in_float32(output: Any) -> Any:
    """A model's output with floating-point tensors in float32, also in dataclasses and dicts of other classes."""
    return map_tensors(Tensor, lambda tensor: tensor.float() if tensor.is_floating_point() else tensor, output)


def cast_tensors(data: Any, dtype: torch.dtype) -> Any:
    """``data`` with its floating-point tensors cast to ``dtype``, also inside dicts, lists and tuples."""
    if isinstance(data, Tensor):
        return data.to(dtype) if data.is_floating_point() else data
    if type(data) is dict:
        return {key: cast_tensors(value, dtype) for key, value in data.items()}
    if type(data) in (list, tuple):
        return type(data)(cast_tensors(value, dtype) for value in data)
    return data


def autocast_computes_in(device_type: str, dtype: torch.dtype) -> bool:
    """Whether autocast on this kind of device computes in ``dtype``; most others warn and stay in float32."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with torch.autocast(device_type, dtype):
                return torch.is_autocast_enabled(device_type)
        except (RuntimeError, AssertionError):  # autocast raises instead; AssertionError if a package is incomplete
            return False


def require(asked: torch.dtype | None, found: tuple[torch.dtype, ...], what: str) -> None:
    """Raise StrategyError unless every dtype in ``found`` is the one asked for."""
    if asked is not None and found and set(found) != {asked}:
        names = ", ".join(str(dtype) for dtype in found)
        raise StrategyError(f"precision: {what} must be {asked} and are {names}")
