"""What DeepSpeed's engine trains: half precision with float32 originals and statistics, and the optimizers it knows."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...core.base.errors import ConfigError, StrategyError
from ...core.base.registry import OPTIMIZERS
from ...core.checkpoint.chunks import FlatShard
from ...core.comm.collectives import is_alone
from ...core.device.precision import BATCH_NORM, cast_tensors, output_in_float32
from ...core.torch_compat.torch_private import in_backward, with_values
from ...optim.adapters import swaps_weights
from ...optim.trial import Samples, draws, why_not_flat_shards, why_not_usable
from ...optim.wrapper import OptimWrapper
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


# Float32 running statistics for batch normalisation in half precision.


_STATISTICS = ("running_mean", "running_var")


class KeepRunningStatistics:
    """Hooks that keep float32 running statistics for one batch normalisation with half-precision weights.

    torch requires statistics in the dtype of the weights, in which small changes of a mean are lost by rounding. So
    forward gets a copy; in training the copy is zero, and after forward it holds the batch's share of the new average.
    """

    def __init__(self, module: BATCH_NORM, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._kept: dict[str, Tensor] = {}
        module.register_forward_pre_hook(self._before)
        module.register_forward_hook(self._after, always_call=True)

    def _before(self, module: nn.Module, args: Any) -> None:
        assert isinstance(module, BATCH_NORM)
        for name in _STATISTICS:
            self._kept[name] = kept = module.get_buffer(name)
            copy = torch.zeros_like(kept, dtype=self._dtype) if module.training else kept.to(self._dtype)
            setattr(module, name, copy)

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        assert isinstance(module, BATCH_NORM)
        for name, kept in self._kept.items():
            share = module.get_buffer(name)
            setattr(module, name, kept)
            # Without output, forward has failed and nothing was averaged; in backward, it is computed again.
            if module.training and output is not None and not in_backward():
                assert module.num_batches_tracked is not None
                factor: Any = 1 / module.num_batches_tracked if module.momentum is None else module.momentum
                kept.mul_(1 - factor).add_(share)
        self._kept.clear()


def keep_running_statistics(module: nn.Module, dtype: torch.dtype) -> None:
    """Keep the running statistics of every batch normalisation in ``module`` in float32."""
    for part in module.modules():
        if isinstance(part, BATCH_NORM) and part.track_running_stats and part.affine:
            KeepRunningStatistics(part, dtype)


# Registration of DeepSpeed's optimizers by name, and the check that DeepSpeed's engine can run an optimizer.


_HOMES = {
    "FusedAdam": "deepspeed.ops.adam",
    "DeepSpeedCPUAdam": "deepspeed.ops.adam",
    "DeepSpeedCPUAdagrad": "deepspeed.ops.adagrad",
    "DeepSpeedCPULion": "deepspeed.ops.lion",
    "FusedLion": "deepspeed.ops.lion",
    "FusedLamb": "deepspeed.ops.lamb",
}

_ERROR_FEEDBACK = "keeps compression errors that differ by process and fit no checkpoint; choose FusedAdam or AdamW"
_REFUSED = {
    **dict.fromkeys(("OnebitAdam", "OnebitLamb", "ZeroOneAdam"), _ERROR_FEEDBACK),
    "MuonWithAuxAdam": "is made from DeepSpeed's own configuration only; choose Muon with others",
}
_REFUSED_ZERO = {
    "FusedLamb": "needs norms of whole parameters, ZeRO gives it shards; choose FusedAdam, or stage 0",
    "Adagrad": "is rebuilt by DeepSpeed without its parameter groups; choose AdamW, or stage 0",
    "SparseAdam": "takes sparse gradients, which ZeRO does not; choose AdamW, or stage 0",
}


def register_optimizers() -> None:
    """Add DeepSpeed's optimizers to the registry, by name; each is imported on use."""
    OPTIMIZERS.add_lookup(_find, lambda: _HOMES)


def _find(name: str) -> Any:
    if name in _REFUSED:
        raise ConfigError(f'optimizer "{name}": {_REFUSED[name]}')
    if name not in _HOMES:
        return None
    try:
        return _with_params(getattr(importlib.import_module(_HOMES[name]), name))
    except ModuleNotFoundError as error:
        advice = "pip install flextrain[deepspeed]" if error.name == "deepspeed" else f"install {error.name}"
        raise ConfigError(f'optimizer "{name}": is one of DeepSpeed\'s and cannot be imported, {advice}') from None


@functools.cache
def _with_params(cls: Any) -> Any:
    """Return the class with ``params`` as first argument, as in torch; some of DeepSpeed's call it ``model_params``."""
    signature = inspect.signature(cls)
    first, *rest = signature.parameters.values()
    if first.name != "model_params":
        return cls

    def make(self: Any, params: Any, **kwargs: Any) -> None:
        cls.__init__(self, params, **kwargs)

    renamed = signature.replace(parameters=[first.replace(name="params"), *rest])
    return type(cls.__name__, (cls,), {"__init__": make, "__signature__": renamed, "__module__": cls.__module__})


def check_supported(wrapper: OptimWrapper, stage: int) -> None:
    """Raise StrategyError if DeepSpeed's engine cannot run this optimizer correctly.

    ZeRO gives an optimizer shards of flattened parameters, so it must update element by element; a trial checks this. One that looks at
    whole parameters gets such from their owners.
    """
    optimizer = wrapper.optimizer
    kind = type(optimizer)
    kinds = dict.fromkeys([kind, *(type(wrapper.adapter.optimizer_of(group)) for group in optimizer.param_groups)])
    for base in (base.__name__ for each in kinds for base in each.__mro__):
        reason = _REFUSED.get(base) or (_REFUSED_ZERO.get(base) if stage else None)  # a class was not refused by _find
        if reason:
            raise StrategyError(f'{wrapper.where}.optimizer.type: "{base}" {reason}')
    if swaps_weights(optimizer):
        raise StrategyError(
            f"{wrapper.where}.optimizer: {kind.__name__} swaps the weights that it has by train() and eval(), and DeepSpeed's engine computes "
            "with copies of these; choose FSDPStrategy or DDPStrategy"
        )
    if wrapper.adapter.is_elementwise or (kind.__name__ in _HOMES and kind.__module__.startswith("deepspeed.")):
        return
    if wrapper.adapter.takes_shards:
        return
    divided = [not (stage and wrapper.adapter.looks_at_whole(group)) for group in optimizer.param_groups]
    kind = type(wrapper.adapter.optimizer_of(optimizer.param_groups[divided.index(True)]))
    samples = Samples.like(
        optimizer, lambda parameter: getattr(parameter, "ds_shape", getattr(parameter, "whole_shape", parameter.shape))
    ).of(divided)
    with with_values():
        reason = (why_not_flat_shards if stage else why_not_usable)(wrapper.make_another, samples)
        if not (stage or reason or is_alone()) and draws(wrapper.make_another, samples):
            reason = "draws random numbers, which are others on every process, so that replicas would differ; choose DDPStrategy"
    if reason and stage == 0:
        raise StrategyError(f"{wrapper.where}.optimizer: {kind.__name__} {reason}")
    if reason:
        raise StrategyError(
            f"{wrapper.where}.optimizer: {kind.__name__} {reason}; ZeRO gives it shards of flattened parameters, choose "
            "AdamW, stage 0, or DDPStrategy"
        )


def take_out_frozen(optimizer: Optimizer, model: nn.Module) -> dict[str, dict[str, Any]]:
    """Leave the frozen parameters out of an optimizer, and groups without any other; return the latter, by name."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        # The group object itself, so that frozen parameters get the values that schedulers set for the group.
        frozen = [parameter for parameter in group["params"] if not parameter.requires_grad]
        group["params"] = [parameter for parameter in group["params"] if parameter.requires_grad]
        if not group["params"]:  # otherwise the trained ones say the same
            found |= {names[id(parameter)]: group for parameter in frozen}
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
    return found
