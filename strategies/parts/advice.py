"""What to do about an error that follows from how the model is spread."""

from __future__ import annotations

from functools import singledispatch

from ...core.base.errors import StrategyError
from ..base import Strategy


@singledispatch
def explain(strategy: Strategy, error: BaseException) -> str | None:
    """Return what to do about an error that follows from how the model is spread; None if it does not."""
    try:
        strategy.noted.check_unchanged()
    except StrategyError as changed:
        return str(changed)
    return None
