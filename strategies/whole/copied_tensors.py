"""Filling a copy of a model with whole tensors, emptying it again, and noticing what was written to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from ...core.errors import StrategyError, counted
from ...core.module_copy_private import replace_tensor
from ...core.torch_private import version_of


def fill(placeholder: Tensor, value: Tensor) -> None:
    """Give a tensor of the copy its value, wherever the copy has it: in several modules, or in lists of tensors."""
    # Either way a tensor of its own on the same memory: who has sent or received the value may still refer to that one.
    made = nn.Parameter(value, requires_grad=False) if isinstance(placeholder, nn.Parameter) else value.detach()
    torch.utils.swap_tensors(placeholder, made)  # type: ignore[no-untyped-call]


def empty(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Free the tensors, also if the user has kept the model."""
    for tensor in tensors.values():
        nothing = torch.empty_like(tensor, device="meta")
        blank = nn.Parameter(nothing, requires_grad=False) if isinstance(tensor, nn.Parameter) else nothing
        try:
            torch.utils.swap_tensors(tensor, blank)  # type: ignore[no-untyped-call]
        except RuntimeError:  # something has a weak reference to it, such as a recurrent layer
            replace_tensor(model, tensor, blank)


class Writes:
    """Notices parameters that are written to: what is gathered is a copy, whose values would be lost."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = parameters
        self._versions: dict[str, int] = {}
        self._written: dict[str, None] = {}
        self.note(parameters)

    def note(self, names: Iterable[str]) -> None:
        """Take the values that parameters have now for those that they are to have."""
        self._versions.update({name: version_of(self._parameters[name]) for name in names})

    def look(self, names: Iterable[str]) -> None:
        """Look which of the parameters were written to since they were noted."""
        self._written |= {name: None for name in names if version_of(self._parameters[name]) != self._versions[name]}

    def check(self) -> None:
        """Raise StrategyError if a parameter was written to."""
        self.look(self._parameters)
        if written := [*self._written]:
            more = f" and {counted(len(written) - 1, 'other parameter')}" if len(written) > 1 else ""
            raise StrategyError(
                f"full_weights: model.{written[0]}{more} was written to inside; shards of it do not have the change, what "
                "is whole on a process may: load the weights again, and change them before setup"
            )
