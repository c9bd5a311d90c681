"""Fully sharded data parallelism (FSDP2): every process keeps a shard of each parameter."""

from __future__ import annotations

from ..blocks import repeated_blocks
from .config import FSDPConfig, MixedPrecision
from .model_wrapper import FSDPWrapperConfig
from .strategy import FSDPStrategy

__all__ = ["FSDPConfig", "FSDPStrategy", "MixedPrecision", "FSDPWrapperConfig", "repeated_blocks"]
