"""Half precision under DeepSpeed: float32 originals of the parameters, and casts of the model's inputs and outputs."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from ...core.checkpoint.flat_shard import FlatShard
from ...core.precision import cast_tensors, output_in_float32
from . import engine_internals
from .swapping import is_in_file


def cast_inputs_and_outputs(model: nn.Module, dtype: torch.dtype, chosen: Collection[int | str] | None) -> None:
    """Cast the model's inputs to ``dtype`` and its outputs to float32, so that losses are computed in float32.

    Args:
        chosen: positions and names of the arguments to cast; None: all.
    """

    def cast(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if chosen is None:
            return cast_tensors(args, dtype), cast_tensors(kwargs, dtype)
        args = tuple(cast_tensors(arg, dtype) if i in chosen else arg for i, arg in enumerate(args))
        return args, {name: cast_tensors(arg, dtype) if name in chosen else arg for name, arg in kwargs.items()}

    model.register_forward_pre_hook(cast, with_kwargs=True)
    model.register_forward_hook(lambda _, __, output: output_in_float32(output))


def float32_originals(model: nn.Module, dtype: torch.dtype, left_out: Collection[str]) -> dict[str, Tensor]:
    """Return the parameters in float32, before the engine casts them; stage 3's existing shards are cast to ``dtype``.

    They are in host memory, or in the files in which shards are: those of trainable parameters are needed only during
    setup, those of frozen ones only for checkpoints.

    Args:
        left_out: names of the parameters that no checkpoint has, of which no original is kept.
    """
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            continue
        split = engine_internals.is_partitioned(parameter)
        if name not in left_out:
            own = engine_internals.own_shard(parameter) if split else parameter.detach()
            found[name] = own if split and is_in_file(parameter) else own.to("cpu", torch.float32, copy=True)
        if split:
            engine_internals.cast_shard(parameter, dtype)
    return found


def own_shard_of_original(model: nn.Module, name: str, original: Tensor) -> Tensor:
    """Return the part of a frozen parameter's original that belongs to this process's shard of the parameter."""
    parameter = model.get_parameter(name)
    if not engine_internals.is_partitioned(parameter) or isinstance(original, FlatShard):
        return original
    shard = engine_internals.own_shard(parameter)
    size = shard.to_local().numel()
    return FlatShard(original.reshape(-1)[shard.start : shard.start + size].clone(), shard.shape, shard.start)
