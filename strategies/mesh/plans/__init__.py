"""Where a plan for tensor parallelism comes from: the model itself, its trace, or the user; and checks of it."""

from __future__ import annotations

from .chosen import check_heads_given, check_styles_given, choose_plan, described, example_of, nearest_rule
from .found import with_globs
from .tracing import why_not_traced, without_memory

__all__ = [
    "check_heads_given",
    "check_styles_given",
    "choose_plan",
    "described",
    "example_of",
    "nearest_rule",
    "why_not_traced",
    "with_globs",
    "without_memory",
]
