"""The losses in what a model gives whose forward has no mode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ...core.errors import ConfigError
from ...core.model import NO_LOSS


def losses_of(result: Any, module: nn.Module) -> dict[str, Any]:
    """Return the ``loss`` of a result, or the parts of one in a dict.

    Args:
        result: what the model's forward gave.
        module: the model, for the message.

    Raises:
        ConfigError: there is none.
    """
    is_dict = isinstance(result, Mapping)
    loss = result["loss"] if is_dict and "loss" in result else getattr(result, "loss", None)
    if isinstance(loss, Tensor) or (is_dict and loss is not None):
        return {"loss": loss}
    # An object with a loss that is None was not given what its loss is computed from.
    if is_dict and "loss" not in result and not hasattr(result, "loss"):
        losses = {name: value for name, value in result.items() if isinstance(name, str) and "loss" in name}
        if losses:
            return losses
    name, kind = type(module).__name__, type(result).__name__
    raise ConfigError(
        f"model: {name}.forward has no parameter mode and gave {kind} without a loss; return an object or dict with a "
        f"loss, or take mode{f': {NO_LOSS}' if is_dict else ''}"
    )
