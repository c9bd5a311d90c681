"""Blueprint: the user's model as it was built, without memory for its tensors, to be filled with whole weights."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...core.errors import StrategyError
from ...core.model import class_name
from ...core.module_copy_private import copy_modules, tensors_of

_VALUES = (bool, int, float, str, type(None))


class Blueprint:
    """The structure of a model before a strategy changed it: classes, attributes, ties, and hooks of the user.

    A copy has modules of its own. What is neither module nor parameter nor buffer is shared with the model: a configuration,
    a dict that forward fills.

    Args:
        model: the model as the user has built it.
        shape_of: returns the whole shape of a parameter or buffer.
    """

    def __init__(self, model: nn.Module, shape_of: Callable[[Tensor], Sequence[int]]) -> None:
        self.problem = _problem(model)
        """Why the model cannot be copied; None if it can."""
        self.shapes = {name: torch.Size(shape_of(tensor)) for name, tensor in tensors_of(model).items()}
        """The whole shapes of the parameters and buffers, by name."""
        self._live = [weakref.ref(module) for module in model.modules()]
        self._before: list[Mapping[str, Any]] = []
        self._model = model if self.problem else copy_modules(model, shape_of)

    def follow(self) -> None:
        """Take note that the strategy has changed the model: later changes of plain attributes are the user's."""
        self._before = [_values(module()) for module in self._live]

    def build(self) -> tuple[nn.Module, dict[str, Tensor]]:
        """Return a copy of the model, and its parameters and buffers by name, on the meta device.

        A tied parameter has the first of its names. Attributes that are numbers, texts or flags, and were changed since
        ``follow``, are as the live model has them now; so is the training flag of every module.

        Raises:
            StrategyError: the model cannot be copied.
        """
        if self.problem is not None:
            raise StrategyError(f"full_weights: {self.problem}")
        model = copy_modules(self._model, lambda tensor: tensor.shape)
        for copy, live, before in zip(model.modules(), self._live, self._before, strict=True):
            for key, value in _values(live()).items():
                if key == "training" or (key in before and value != before[key]):
                    vars(copy)[key] = value
        return model, tensors_of(model)


def _values(module: nn.Module | None) -> Mapping[str, Any]:
    return {} if module is None else {key: value for key, value in vars(module).items() if isinstance(value, _VALUES)}


def _problem(model: nn.Module) -> str | None:
    """Return why a model cannot be copied."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            where = f"model.{name}" if name else "model"
            return f"{where} is a ScriptModule, of which there is no copy with whole weights; give {class_name(model)} as Python"
    return None
