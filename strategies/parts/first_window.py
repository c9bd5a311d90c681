"""What only a first batch shows: whether a strategy trains the model as one device does."""

from __future__ import annotations

from collections.abc import Sequence
from functools import singledispatch
from typing import Any

from ..base import Strategy, TrainStep


@singledispatch
def check_window(strategy: Strategy, window: Sequence[Any], step: TrainStep) -> None:
    """Raise StrategyError for a model that this strategy would train wrongly; once, for the window of the first update.

    Called before the hooks of that update. Nothing of it remains: no gradient, no state, no random number.
    """
