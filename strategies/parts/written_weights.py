"""The parameters that a model computes with, for who writes to frozen ones itself, such as a teacher's."""

from __future__ import annotations

from collections.abc import Collection
from functools import singledispatch

from torch import Tensor

from ..base import Strategy


@singledispatch
def computed_with(strategy: Strategy) -> dict[str, Tensor]:
    """Return this process's live parameters as the model computes with them, not their masters, by name.

    Types give the layout, as in ``model_state``. Whoever writes to frozen ones calls ``take_written`` afterwards.
    """
    return {name: parameter.detach() for name, parameter in strategy.parameters()}


@singledispatch
def take_written(strategy: Strategy, names: Collection[str]) -> None:
    """Let the next forward use what was written to ``computed_with(strategy)[name]`` of frozen parameters; a collective.

    Args:
        names: of the parameters; those that other processes hold are not among them.
    """
