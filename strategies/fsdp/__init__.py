"""Fully sharded data parallelism (FSDP2): every process keeps a shard of each parameter."""

from __future__ import annotations

from ..recomputation import repeated_blocks
from .config import FSDPConfig, FSDPWrapperConfig, MixedPrecision
from .strategy import FSDPStrategy

__all__ = ["FSDPConfig", "FSDPStrategy", "MixedPrecision", "FSDPWrapperConfig", "repeated_blocks"]
