"""Where a plan for tensor parallelism comes from: the model itself, its trace, or the user; and checks of it."""

from __future__ import annotations

from .chosen import check_heads_given, check_styles_given, choose_plan, described, nearest_rule
from .tracing import without_memory

__all__ = ["check_heads_given", "check_styles_given", "choose_plan", "described", "nearest_rule", "without_memory"]
