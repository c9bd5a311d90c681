"""Precision as a contract: what was asked for, and what the tensors really are."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .errors import ConfigError, StrategyError, one_of
from .norms import is_norm

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
    """What an OptimWrapper asks for; a Strategy carries it out.

    Attributes:
        compute: dtype of the arithmetic in forward and backward; None takes the device's own choice for autocast.
        param: dtype that the model's floating-point parameters are stored in; None leaves them as they are.
        keep_norm: normalisation layers keep their dtype when ``param`` is given.
        reduce: dtype in which gradients are reduced over processes; None is the gradients' own.
        loss_scale: "dynamic" or a factor for float16; None for no scaling.
    """

    compute: torch.dtype | None = torch.float32
    param: torch.dtype | None = None
    keep_norm: bool = True
    reduce: torch.dtype | None = None
    loss_scale: float | Literal["dynamic"] | None = None

    @property
    def autocast(self) -> bool:
        """Whether forward runs under torch.autocast: compute in another dtype than the parameters'."""
        return self.compute is not torch.float32 and self.param is None


@dataclass(frozen=True)
class PrecisionReport:
    """The dtypes in force after set-up, read off the tensors; empty is what does not exist.

    Attributes:
        compute: of forward and backward.
        parameters: of the trainable parameters.
        masters: of their copies that are updated in their place.
        gradients: in which gradients are reduced.
        optimizer_state: of moments and the like, known after the first update.
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


def cast_parameters(module: nn.Module, precision: Precision) -> None:
    """Store the module's floating-point parameters and buffers in ``precision.param``, and cast what goes in and out.

    Inputs of the outermost call become ``param``, its outputs float32, so that losses are computed in float32.
    """
    dtype = precision.param
    if dtype is None:
        return
    for submodule in module.modules():
        if precision.keep_norm and is_norm(submodule):
            # A float32 normalisation layer between half-precision layers: cast on its way in and out.
            submodule.register_forward_pre_hook(_cast_hook(torch.float32), with_kwargs=True)
            submodule.register_forward_hook(lambda _, __, output, d=dtype: cast_tensors(output, d))
            continue
        for tensor in (*submodule.parameters(recurse=False), *submodule.buffers(recurse=False)):
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)
    module.register_forward_pre_hook(_cast_hook(dtype), with_kwargs=True)
    module.register_forward_hook(lambda _, __, output: cast_tensors(output, torch.float32))


def _cast_hook(dtype: torch.dtype) -> Callable[..., Any]:
    def cast(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return cast_tensors(args, dtype), cast_tensors(kwargs, dtype)

    return cast


def cast_tensors(data: Any, dtype: torch.dtype) -> Any:
    """``data`` with its floating-point tensors in ``dtype``; dicts, lists and tuples are followed."""
    if isinstance(data, Tensor):
        return data.to(dtype) if data.is_floating_point() else data
    if type(data) is dict:
        return {key: cast_tensors(value, dtype) for key, value in data.items()}
    if type(data) in (list, tuple):
        return type(data)(cast_tensors(value, dtype) for value in data)
    return data


def autocast_computes_in(device_type: str, dtype: torch.dtype) -> bool:
    """Whether autocast does on this kind of device what it is told; on most it warns and leaves float32 as it is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with torch.autocast(device_type, dtype):
                return torch.is_autocast_enabled(device_type)
        except (RuntimeError, AssertionError):  # on others it raises; the latter where a package lacks what it needs
            return False


def require(asked: torch.dtype | None, found: tuple[torch.dtype, ...], what: str) -> None:
    """Raise StrategyError unless every dtype in ``found`` is the one asked for."""
    if asked is not None and found and set(found) != {asked}:
        names = ", ".join(str(dtype) for dtype in found)
        raise StrategyError(f"precision: {what} must be {asked} and are {names}")
