"""The configurations of a model's adapters of peft, as plain values for checkpoints: exports need them."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

from torch import nn

ADAPTERS = "adapters"
"""Key of a checkpoint: configurations by the name of the module with the adapters ("" is the model), and the adapter's name."""


def adapter_configurations(model: nn.Module) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the configurations of the outermost modules that have adapters; empty for a model without any.

    Args:
        model: the user's module, after ``get_peft_model`` or the transform LoRA.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for name, module in model.named_modules():
        if any(not outer or name.startswith(f"{outer}.") for outer in found):
            continue
        configurations = getattr(module, "peft_config", None)
        if isinstance(configurations, Mapping) and all(hasattr(each, "to_dict") for each in configurations.values()):
            found[name] = {str(adapter): _as_json(each.to_dict()) for adapter, each in configurations.items()}
    return found


def transposed_layers(model: nn.Module) -> list[str]:
    """Return the names of the layers with an adapter whose weights have their inputs first.

    Args:
        model: as for ``adapter_configurations``; of a pipeline this process's part.
    """
    return [name for name, module in model.named_modules() if getattr(module, "fan_in_fan_out", None) is True]


def _as_json(value: Any) -> Any:
    """A value of a configuration as JSON has it, in the way in which peft writes it."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): _as_json(each) for key, each in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(map(_as_json, value), key=str)
    if isinstance(value, (list, tuple)):
        return [_as_json(each) for each in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
