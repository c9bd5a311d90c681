"""Fully sharded data parallelism (FSDP2): every process keeps a shard of each parameter."""

from __future__ import annotations

from ..recomputation import repeated_blocks
from .config import FSDPConfig, FSDPWrapperConfig, MixedPrecision
from .strategy import FSDPStrategy
from .units import choose_roots, choose_units

__all__ = [
    "FSDPConfig",
    "FSDPStrategy",
    "MixedPrecision",
    "FSDPWrapperConfig",
    "choose_roots",
    "choose_units",
    "repeated_blocks",
]
