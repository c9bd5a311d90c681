"""Try the transforms of a configuration on its model, without memory for parameters, and tell what they change."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from ..core.deferred import DeferredInit
from ..core.model import BaseModel
from ..core.random_state import kept_random_state
from ..runner.build import build_model
from ..runner.transforms.apply import transform
from ..runner.transforms.build import Transform


class _Building:
    """What builds and changes a model without memory, as a strategy does."""

    def __init__(self) -> None:
        self._context = DeferredInit()

    def init_context(self) -> AbstractContextManager[Any]:
        return self._context

    def construct(self, make: Callable[[], nn.Module], initialise: Callable[[nn.Module], None]) -> nn.Module:
        with self.init_context():
            model = make()
        initialise(model)
        return model

    def init_weights(self, model: BaseModel) -> None:
        """Do nothing: values are not looked at."""

    def change_context(self, model: nn.Module, state: Tensor) -> AbstractContextManager[Any]:
        return self._context.changing(state)

    def shape_of(self, tensor: Tensor) -> Sequence[int]:
        return tensor.shape


def try_transforms(given: Mapping[str, Any], transforms: Sequence[Transform]) -> list[str]:
    """Return a line for each transform with what it changes.

    Those that need the model's values, and those after them, are not tried. A model that is given as an instance is changed.

    Args:
        given: the arguments of a runner.
        transforms: built from them.

    Raises:
        ConfigError: a transform does not fit the model.
    """
    number = next((index for index, each in enumerate(transforms) if each.needs_values), len(transforms))
    tried, building = transforms[:number], _Building()
    said: tuple[tuple[str, str], ...] = ()
    if tried:
        with kept_random_state(torch.device("cpu")):
            model = build_model(given["model"], given["data_preprocessor"], building, for_training=False)  # type: ignore[arg-type]
            _, said = transform(model, tried, building, seed=0)
    lines = [f"{each.where} {each.name}: {what}" for each, (_, what) in zip(tried, said, strict=True)]
    why = "is not tried, because {} the model's values"
    rest = [
        f"{each.where} {each.name}: {why.format('it needs' if each.needs_values else 'one before it needs')}"
        for each in transforms[number:]
    ]
    return [*lines, *rest]
