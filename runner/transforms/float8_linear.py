"""The linear layer that Float8Training makes: torchao's, for any number of rows, and any kind of autocast."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torchao.float8 import convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear as Layer

_ROWS = 16
"""GPUs multiply float8 only where this number divides what is summed over: for the gradient of the weight, the rows."""


class Float8Linear(Layer):  # type: ignore[misc]  # torchao has no types
    """Multiplies in float8.

    Rows of zeros make up what is missing to a multiple of 16, as in an epoch's last batch: no product has anything of them, and
    the largest values are the same.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return the outputs (..., out_features), in the dtype of ``input``, or that of autocast.

        Args:
            input: (..., in_features), of a floating-point dtype.
        """
        kind = input.device.type
        if torch.is_autocast_enabled(kind):  # torchao asks for that of CUDA
            input = input.to(torch.get_autocast_dtype(kind))
        shape = input.shape[:-1]
        rows = shape.numel()
        missing = -rows % _ROWS if rows else _ROWS  # nothing has no largest value
        if not missing:
            return cast(Tensor, super().forward(input))
        flat = input.reshape(rows, self.in_features)
        padded = torch.cat((flat, flat.new_zeros(missing, self.in_features)))  # torch 2.11 has no pad of DTensors
        return cast(Tensor, super().forward(padded)[:rows].reshape(*shape, self.out_features))


def to_float8(layer: nn.Linear, config: Any) -> None:
    """Let a layer compute in float8; it stays the same object, with its parameters and hooks.

    Args:
        config: torchao's Float8LinearConfig.
    """
    made = vars(convert_to_float8_training(layer, config=config))
    vars(layer).update({name: made[name] for name in made.keys() - vars(layer).keys()})
    layer.__class__ = Float8Linear
