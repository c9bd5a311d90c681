"""How a strategy makes a model that is not set up yet: built and initialised in its context, maybe without memory or in shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import singledispatch
from typing import Any, Protocol

from torch import Tensor, nn

from ..core.model.base_model import BaseModel


class Builds(Protocol):
    """What building a model asks of a strategy."""

    def building(self, model: nn.Module | None = None, draws: Tensor | None = None) -> AbstractContextManager[Any]:
        """See Strategy."""


@singledispatch
def hooks_of(strategy: Any) -> Sequence[Any]:
    """Return the hooks that a strategy needs, which the runner adds to those of the configuration; called once, after ``join``."""
    return ()


@singledispatch
def shape_of(strategy: Builds, tensor: Tensor) -> Sequence[int]:
    """Return the whole shape of a parameter or buffer of the model, which may be sharded since ``building``."""
    return tensor.shape


@singledispatch
def construct(
    strategy: Builds, make: Callable[[], nn.Module], initialise: Callable[[nn.Module], None] | None = None
) -> nn.Module:
    """Return the model that ``make`` builds in the strategy's ``building``; before ``setup``.

    Args:
        initialise: called with the model, outside of the context.
    """
    with strategy.building():
        model = make()
    if initialise is not None:
        initialise(model)
    return model


@singledispatch
def init_weights(strategy: Builds, model: BaseModel) -> None:
    """Call ``model.init_weights()`` for a model that ``construct`` has built; before ``setup``."""
    with strategy.building(model):
        model.init_weights()
