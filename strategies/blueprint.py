"""Blueprint: the user's model as it was built, without memory for its tensors, to be filled with whole weights."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ..core.base.errors import StrategyError
from ..core.model.base_model import class_name
from ..core.torch_compat.torch_private import copy_modules, replace_tensor, tensors_of

EMPTY: Mapping[str, bool] = MappingProxyType({})
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
        self.buffers = frozenset(name for name, _ in model.named_buffers())
        """The names of the buffers."""
        self._live = [weakref.ref(module) for module in model.modules()]
        self._before: list[Mapping[str, Any]] = []
        self._model = model if self.problem else copy_modules(model, shape_of)

    def follow(self) -> None:
        """Take note that the strategy has changed the model: later changes of plain attributes are the user's."""
        self._before = [_values(module()) for module in self._live]

    def build(
        self, late: Mapping[str, bool] = EMPTY, gone: Collection[str] = ()
    ) -> tuple[nn.Module, dict[str, Tensor]]:
        """Return a copy of the model, and its parameters and buffers by name, on the meta device.

        A tied parameter has the first of its names. Attributes that are numbers, texts or flags, and were changed since
        ``follow``, are as the live model has them now; so is the training flag of every module.

        Args:
            late: names of buffers that were added since set-up, each with True if it is persistent.
            gone: names of buffers that have become None since.

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
        for name, tensor in tensors_of(model).items():
            if name in gone:
                replace_tensor(model, tensor, None)
        for name, persistent in late.items():
            _add_buffer(model, name, persistent)
        return model, tensors_of(model)


def _add_buffer(model: nn.Module, name: str, persistent: bool) -> None:
    owner, _, key = name.rpartition(".")
    try:
        module = model.get_submodule(owner)
    except AttributeError as error:
        raise StrategyError(
            f"full_weights: model.{name} is in a module that was added after set-up; make the model so before the runner is made"
        ) from error
    vars(module).pop(key, None)
    module.register_buffer(key, torch.empty(0, device="meta"), persistent)


def _values(module: nn.Module | None) -> Mapping[str, Any]:
    return {} if module is None else {key: value for key, value in vars(module).items() if isinstance(value, _VALUES)}


def _problem(model: nn.Module) -> str | None:
    """Return why a model cannot be copied."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            where = f"model.{name}" if name else "model"
            return f"{where} is a ScriptModule, of which there is no copy with whole weights; give {class_name(model)} as Python"
    return None
