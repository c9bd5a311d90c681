"""ZeRO through DeepSpeed; the package deepspeed is imported only when a strategy is constructed."""

from __future__ import annotations

from .half_precision import register_optimizers
from .strategy import DeepSpeedStrategy
from .wrapper import DeepSpeedOptimWrapper

register_optimizers()

__all__ = ["DeepSpeedOptimWrapper", "DeepSpeedStrategy"]
