"""Build the configuration of DeepSpeed's engine, with every key explicit, from the options and the OptimWrapper."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...core.base.errors import ConfigError, StrategyError
from ...core.base.overriding import overridden
from ...core.device.device import overflows_to_inf
from ...core.device.precision import Precision
from ...optim.amp import AmpOptimWrapper
from ...optim.wrapper import OptimWrapper
from .config import WHERE, Bf16, DeepSpeedConfig, EngineCheckpointing
from .swap_files import SwapFiles
from .wrapper import DeepSpeedOptimWrapper

_NEVER = 10**15  # updates between two of DeepSpeed's log lines


@dataclass(frozen=True)
class Request:
    """The settings that result from the options and the wrapper together.

    Attributes:
        dtype: dtype of the model and of its computation.
        max_norm: largest total gradient norm; 0 means no clipping.
        accumulate: micro-batches per update.
        loss_scaling: DeepSpeed's keys for float16.
        skips: whether updates that are not finite are skipped; under float16 and float32 they always are.
    """

    dtype: torch.dtype
    max_norm: float
    accumulate: int
    loss_scaling: dict[str, Any]
    skips: bool = False

    @property
    def precision(self) -> Precision:
        """The dtype and loss scale in the form of OptimWrapper.precision."""
        scale: Any = self.loss_scaling.get("loss_scale") or "dynamic"
        return Precision(compute=self.dtype, loss_scale=scale if self.dtype is torch.float16 else None)


def check_accelerator(deepspeed: Any, device: torch.device) -> None:
    """Raise StrategyError if DeepSpeed works on another kind of device."""
    accelerator = deepspeed.accelerator.get_accelerator().device_name()
    if accelerator != device.type:
        raise StrategyError(
            f'strategy.device: "{device.type}" was chosen and DeepSpeed works on "{accelerator}", set '
            f"DS_ACCELERATOR={device.type} in the environment"
        )


def resolve(config: DeepSpeedConfig, optim: OptimWrapper | None, device: torch.device) -> Request:
    """Return the settings that can be given both in the options and in the wrapper.

    Raises:
        ConfigError: the two places give different values.
        StrategyError: the engine does not support a setting.
    """
    dtype = _dtype(config, optim)
    if dtype is torch.float16 and device.type == "cpu":
        raise StrategyError(
            f"{WHERE}.fp16: DeepSpeed has no float16 on the CPU, use bfloat16: {WHERE}.bf16=dict(enabled=True) or "
            'optim_wrapper=dict(type="AmpOptimWrapper", dtype="bfloat16")'
        )
    if dtype is torch.float16 and not overflows_to_inf(device.type):
        raise StrategyError(
            f"{WHERE}.fp16: DeepSpeed's loss scaling looks for inf, and this {device.type} stops at the largest number; set "
            f"INF_NAN_MODE_ENABLE=1 where the chip has that, or use bfloat16: {WHERE}.bf16=dict(enabled=True)"
        )
    scaling = _loss_scaling(config, optim) if dtype is torch.float16 else {}
    skips = optim is not None and optim.guard is not None
    return Request(dtype, _max_norm(config, optim), _accumulate(config, optim), scaling, skips)


def _dtype(config: DeepSpeedConfig, optim: OptimWrapper | None) -> torch.dtype:
    homes = ((torch.bfloat16, "bf16", config.bf16), (torch.float16, "fp16", config.fp16))
    wanted = optim.precision.compute if isinstance(optim, AmpOptimWrapper) else None
    if wanted is None or (isinstance(optim, AmpOptimWrapper) and optim.chose_dtype and config.own_dtype is not None):
        return config.own_dtype or torch.float32
    for dtype, key, home in homes:
        if home is not None and home.enabled != (dtype is wanted):
            raise ConfigError(
                f"{WHERE}.{key}.enabled: {home.enabled} disagrees with optim_wrapper, which asks for {wanted}; "
                "give one of them"
            )
    return wanted


def _max_norm(config: DeepSpeedConfig, optim: OptimWrapper | None) -> float:
    own = config.gradient_clipping
    clip = optim.clip_grad if optim is not None else None
    if clip is None:
        return float(own or 0.0)
    where = f"{optim.where}.clip_grad" if optim is not None else ""
    if clip.type != "norm" or clip.max_norm is None:
        raise StrategyError(f'{where}.type: "{clip.type}" is not supported by DeepSpeed, choose "norm"')
    if clip.norm_type != 2:
        raise StrategyError(f"{where}.norm_type: {clip.norm_type} is not supported by DeepSpeed, choose 2")
    if clip.error_if_nonfinite:
        raise StrategyError(f"{where}.error_if_nonfinite: True is not supported, DeepSpeed clips inside its update")
    if own is not None and own != clip.max_norm:
        raise ConfigError(
            f"{WHERE}.gradient_clipping: {own} disagrees with {where}.max_norm={clip.max_norm}, give one of them"
        )
    return float(clip.max_norm)


def _accumulate(config: DeepSpeedConfig, optim: OptimWrapper | None) -> int:
    own, given = config.gradient_accumulation_steps, optim.accumulate if optim is not None else 1
    if own is not None and given != 1 and own != given:
        raise ConfigError(
            f"{WHERE}.gradient_accumulation_steps: {own} disagrees with optim_wrapper.accumulative_counts={given}, "
            "give one of them"
        )
    return own or given


def _loss_scaling(config: DeepSpeedConfig, optim: OptimWrapper | None) -> dict[str, Any]:
    if config.fp16 is not None:
        return config.fp16.model_dump(exclude={"enabled", "auto_cast"})
    given = optim.loss_scale if isinstance(optim, AmpOptimWrapper) else None
    # The policy of torch's GradScaler: halve after one overflow, double after loss_scale_window updates without one.
    keys: dict[str, Any] = {"loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 2000, "hysteresis": 1}
    if isinstance(given, (int, float)):
        keys["loss_scale"] = given
    elif isinstance(given, dict):
        if given.get("growth_factor", 2.0) != 2.0 or given.get("backoff_factor", 0.5) != 0.5:
            raise StrategyError("optim_wrapper.loss_scale: DeepSpeed doubles and halves, leave out both factors")
        power = math.log2(given.get("init_scale", 2.0**16))
        if power != int(power) or power < 0:
            raise StrategyError("optim_wrapper.loss_scale.init_scale: DeepSpeed needs a power of two, such as 65536.0")
        keys |= {"initial_scale_power": int(power), "loss_scale_window": given.get("growth_interval", 2000)}
    return keys


_CALLED = tuple(name for name, value in vars(OptimWrapper).items() if callable(value) and not name.startswith("__"))


def check_wrapper(optim: object) -> OptimWrapper:
    """Return ``optim`` if DeepSpeed's engine can do its work.

    Raises:
        StrategyError: several optimizers, or a custom wrapper.
    """
    own = ", ".join(overridden(optim, *_CALLED))
    is_ours = type(optim) in (OptimWrapper, AmpOptimWrapper) and not own
    if not is_ours and not isinstance(optim, DeepSpeedOptimWrapper):
        kind = type(optim).__name__
        several = "has several optimizers, DeepSpeed's engine has one" if isinstance(optim, Mapping) else ""
        reason = several or (
            f"{f'defines its own {own}' if own else 'does its own arithmetic'}, DeepSpeed's engine does it here; give "
            "OptimWrapper, or a subclass of DeepSpeedOptimWrapper"
        )
        raise StrategyError(f'optim_wrapper.type: "{kind}" {reason}')
    assert isinstance(optim, OptimWrapper)
    return optim


def engine_config(
    config: DeepSpeedConfig,
    request: Request,
    *,
    stage: int,
    world_size: int,
    on_cpu: bool,
    num_elements: int,
    checkpointing: EngineCheckpointing | None,
    files: SwapFiles,
) -> dict[str, Any]:
    """Return DeepSpeed's configuration.

    Args:
        stage: ZeRO's stage; 0 if there is nothing to shard.
        num_elements: number of elements of the model, an upper bound for buckets.
        files: gives the keys for state in files.
    """
    zero = config.zero_optimization.model_dump(exclude_none=True)
    zero["stage"] = stage
    if zero.get("overlap_comm") is None:
        zero["overlap_comm"] = stage == 3 and not on_cpu
    if stage != 3:
        zero.pop("offload_param", None)
    for key in ("reduce_bucket_size", "allgather_bucket_size"):
        zero[key] = min(zero[key], num_elements + num_elements % 2)
    zero["round_robin_gradients"] = False
    micro = _micro_batch(config, request.accumulate, world_size)
    bf16 = config.bf16 or Bf16()
    keys: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro,
        # The losses of a window are already divided by its length.
        "gradient_accumulation_steps": 1,
        "train_batch_size": micro * world_size,
        # Always given, because DeepSpeed 0.19.3 changed the default from 0 to 1.0.
        "gradient_clipping": request.max_norm if stage else 0.0,
        "bf16": {
            "enabled": request.dtype is torch.bfloat16,
            "check_grad_overflow": bf16.check_grad_overflow or request.skips,
        },
        "fp16": {"enabled": request.dtype is torch.float16, **request.loss_scaling},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": config.zero_allow_untested_optimizer,
        "zero_force_ds_cpu_optimizer": config.zero_force_ds_cpu_optimizer,
        "prescale_gradients": config.prescale_gradients,
        "gradient_predivide_factor": float(config.gradient_predivide_factor),
        "steps_per_print": config.steps_per_print or _NEVER,
        "wall_clock_breakdown": config.wall_clock_breakdown,
        # The caller, not DeepSpeed, decides when an accumulation window ends.
        "managed_gradient_accumulation": False,
    }
    if config.communication_data_type:
        keys["communication_data_type"] = config.communication_data_type
    if aio := files.keys(zero):
        keys["aio"] = aio
    if checkpointing:
        keys["activation_checkpointing"] = checkpointing.model_dump(exclude_none=True)
    return keys


def _micro_batch(config: DeepSpeedConfig, accumulate: int, world_size: int) -> int:
    whole, micro = config.train_batch_size, config.train_micro_batch_size_per_gpu
    if whole is None:
        return micro or 1
    parts = accumulate * world_size
    if whole != (micro or whole // parts) * parts:
        size = "train_micro_batch_size_per_gpu" if micro is None else f"train_micro_batch_size_per_gpu={micro}"
        raise ConfigError(
            f"{WHERE}.train_batch_size: {whole} is not {size} x {accumulate} micro-batches x {world_size} processes"
        )
    return micro or whole // parts
