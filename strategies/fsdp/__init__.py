"""Fully sharded data parallelism (FSDP2): every process keeps a shard of each parameter."""

from __future__ import annotations

from .config import FSDPConfig, MixedPrecision
from .model_wrapper import FSDPWrapperConfig
from .strategy import FSDPStrategy
from .units import repeated_blocks

__all__ = ["FSDPConfig", "FSDPStrategy", "MixedPrecision", "FSDPWrapperConfig", "repeated_blocks"]
