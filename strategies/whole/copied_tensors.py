"""Filling a copy of a model with whole tensors, emptying it again, and noticing what was written to them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ...core.errors import StrategyError, counted
from ...core.module_copy_private import replace_tensor
from ...core.torch_private import version_of


def fill(placeholder: Tensor, value: Tensor) -> None:
    """Give a tensor of the copy its value, wherever the copy has it: in several modules, or in lists of tensors."""
    made = nn.Parameter(value, requires_grad=False) if isinstance(placeholder, nn.Parameter) else value
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
        self._versions = {name: (parameter, version_of(parameter)) for name, parameter in parameters.items()}

    def check(self) -> None:
        """Raise StrategyError if a parameter was written to."""
        written = [name for name, (parameter, version) in self._versions.items() if version_of(parameter) != version]
        if written:
            more = f" and {counted(len(written) - 1, 'other parameter')}" if len(written) > 1 else ""
            raise StrategyError(
                f"full_weights: model.{written[0]}{more} was written to inside; shards of it do not have the change, what "
                "is whole on a process may: load the weights again, and change them before setup"
            )
