"""Where a plan for tensor parallelism comes from: the model itself, its trace, or the user; and checks of it."""

from __future__ import annotations

from .chosen import choose_plan
from .shares import described

__all__ = ["choose_plan", "described"]
