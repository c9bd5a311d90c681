"""The losses in what a model gives whose forward has no mode."""

from __future__ import annotations

import dataclasses
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


def losses_left_out(result: Any) -> list[str]:
    """Return the names of losses beside ``loss`` in a result that would have gradients, and that ``loss`` does not contain.

    Models of transformers, and many others, give parts of their loss beside it; these belong to its graph. Where ``loss`` and
    another one come out of one operation, as of a compiled model, the graph does not tell; then only transformers is believed.
    """
    values = _values(result)
    loss = values.get("loss")
    names = [name for name in values if isinstance(name, str) and "loss" in name and name != "loss"]
    others = {name: value for name in names if isinstance(value := values[name], Tensor) and value.requires_grad}
    if not others or not isinstance(loss, Tensor):
        return []
    pending, seen = [(loss.grad_fn, loss.output_nr)], set[Any]()
    while pending:
        node = pending.pop()
        if node[0] is not None and node not in seen:
            seen.add(node)
            pending += node[0].next_functions
    is_output = any(kind.__name__ == "ModelOutput" for kind in type(result).__mro__)
    return [
        name
        for name, value in others.items()
        if (value.grad_fn, value.output_nr) not in seen and not (is_output and value.grad_fn is loss.grad_fn)
    ]


def _values(result: Any) -> Mapping[Any, Any]:
    if isinstance(result, Mapping):
        return result
    if dataclasses.is_dataclass(result):
        return {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    return result._asdict() if hasattr(result, "_asdict") else getattr(result, "__dict__", {})
