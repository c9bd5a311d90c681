"""Prepare a model's parameters for a strategy that cuts them, flattened, into shards."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from ..core.errors import StrategyError
from ..core.torch_private import storage_key

QUANTISERS = ("bitsandbytes", "torchao")
"""Packages whose tensors are no rows of numbers that could be divided."""
_logger = logging.getLogger("flextrain")


def check_real(model: nn.Module, strategy: str) -> None:
    """Raise StrategyError if a parameter is complex, whose shards would be joined with those of real ones, or quantised.

    Also if two of them share memory, which their shards would not.
    """
    check_not_quantised(model, strategy)
    check_apart(model, strategy)
    for name, parameter in model.named_parameters():
        if parameter.is_complex():
            raise StrategyError(
                f"model.{name}: is {str(parameter.dtype).removeprefix('torch.')}, and {strategy} shards real parameters "
                "only; hold it as pairs of real numbers (torch.view_as_real), make it a buffer, or choose DDPStrategy"
            )


def check_dense(model: nn.Module, strategy: str, instead: str = "choose DDPStrategy") -> None:
    """Raise StrategyError if a layer gives sparse gradients, which have no elements to divide or to join."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
            raise StrategyError(
                f"model.{name}: has sparse=True, and {strategy} takes dense gradients only; give sparse=False, freeze it, or {instead}"
            )


def has_shards(parameter: nn.Parameter) -> bool:
    """Return whether a parameter can be divided: it has a dimension, and elements."""
    return parameter.ndim > 0 and parameter.numel() > 0


def check_apart(model: nn.Module, strategy: str) -> None:
    """Raise StrategyError if two parameters begin at the same memory, as ``Parameter(other.data)`` does."""
    first: dict[tuple[int, Any], str] = {}
    for name, parameter in model.named_parameters():
        position = (storage_key(parameter), parameter.storage_offset())
        if parameter.numel() and (other := first.setdefault(position, name)) != name:
            raise StrategyError(
                f"model.{name}: is another parameter than model.{other} in the same memory, which {strategy} cannot keep; assign the "
                "same parameter to both, or clone() its values"
            )


def check_not_quantised(model: nn.Module, strategy: str) -> None:
    """Raise StrategyError if a parameter is of a package whose tensors are more than numbers in rows."""
    for name, parameter in model.named_parameters():
        if type(parameter).__module__.partition(".")[0] in QUANTISERS:
            raise StrategyError(
                f"model.{name}: is quantised ({type(parameter).__name__}), which {strategy} cannot share between processes; train "
                "on one device, or leave the weights as they are"
            )


def make_contiguous(model: nn.Module) -> None:
    """Give parameters in another order of memory, such as ``channels_last``, the usual one; log their names.

    Values, shapes and results do not change.
    """
    names = []
    for name, parameter in model.named_parameters():
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
            names.append(name)
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        _logger.warning(
            f"model.{names[0]}{more}: memory_format (channels_last or another) is not kept by a strategy that shards "
            "parameters, they are stored contiguously; channels_last inputs still make layers compute in that format"
        )
