"""ZeRO through DeepSpeed; nothing here imports deepspeed before a strategy is made."""

from __future__ import annotations

from .optimizers import register_optimizers
from .strategy import DeepSpeedStrategy
from .wrapper import DeepSpeedOptimWrapper

register_optimizers()

__all__ = ["DeepSpeedOptimWrapper", "DeepSpeedStrategy"]
