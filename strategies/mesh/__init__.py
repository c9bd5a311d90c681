"""Any product of data, tensor, context, expert and pipeline parallelism, for unmodified models."""

from __future__ import annotations

from .axis import Axis
from .config import MeshConfig
from .strategy import MeshStrategy

__all__ = ["Axis", "MeshConfig", "MeshStrategy"]
