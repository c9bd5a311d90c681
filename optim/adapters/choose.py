"""Choose the adapter of an optimizer."""

from __future__ import annotations

from torch.optim import Optimizer

from .base import OptimizerAdapter
from .deepspeed_adam import DeepSpeedAdamAdapter, is_deepspeed_adam
from .npu_fused import FusedAdapter, is_fused


def adapter_for(optimizer: Optimizer, where: str) -> OptimizerAdapter:
    """Return the adapter of an optimizer; ``where`` is the configuration key of its wrapper."""
    if is_fused(optimizer):
        return FusedAdapter(optimizer, where)
    if is_deepspeed_adam(optimizer):
        return DeepSpeedAdamAdapter(optimizer, where)
    return OptimizerAdapter(optimizer, where)
