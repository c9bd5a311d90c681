"""The optimizer's part of a checkpoint: keys of its state, and conversion of hyper-parameters from and to groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..core.errors import CheckpointError
from .adapters.base import OptimizerAdapter

STATE = "optim.state."
"""``optim.state.<parameter>.<key>``: the optimizer state of a parameter."""
GROUP = "optim.group."
"""``optim.group.<parameter>.<key>``: the current hyper-parameters of a parameter."""
KIND = "optimizer"
"""``optim.group.<parameter>.optimizer``: the class of its optimizer."""
FROZEN = "frozen"
"""Key of a checkpoint: the names of the parameters that were frozen, in the optimizer's groups for when they are thawed."""

# These choose an implementation for the machine; they do not change the result, so checkpoints leave them out.
_IMPLEMENTATION_KEYS = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})


def split_key(key: str) -> tuple[str, str, str]:
    """Split a checkpoint's key into (``STATE`` or ``GROUP``, parameter, key); three empty strings for any other key."""
    for prefix in (STATE, GROUP):
        if key.startswith(prefix):
            parameter, _, item = key.removeprefix(prefix).rpartition(".")
            return prefix, parameter, item
    return "", "", ""


def hyper_parameters(adapter: OptimizerAdapter, group: Mapping[str, Any], parameter: str) -> dict[str, Any]:
    """Return a parameter's entries in a checkpoint: hyper-parameters of its group and class of its optimizer."""
    values = {
        key: value for key, value in adapter.hyper_parameters_of(group).items() if key not in _IMPLEMENTATION_KEYS
    }
    # torch accepts a 0-dim tensor as learning rate; the next run may use a number.
    plain_values = {key: value.item() if isinstance(value, Tensor) else value for key, value in values.items()}
    return {f"{GROUP}{parameter}.{key}": value for key, value in ({KIND: adapter.name} | plain_values).items()}


def restored_hyper_parameters(
    adapter: OptimizerAdapter, group: Mapping[str, Any], saved: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a parameter's hyper-parameters from a checkpoint, in the form of its group.

    Args:
        adapter: of the optimizer.
        group: the parameter's group, which is not changed.
        saved: the values, by the last part of their keys.

    Raises:
        CheckpointError: they belong to another class of optimizer.
    """
    kind = saved.get(KIND, adapter.name)
    if kind != adapter.name:
        raise CheckpointError(
            f"optimizer: the checkpoint's is {kind}, the configuration's is {type(adapter.optimizer).__name__}; resume with "
            "the same one, or start from the weights alone with load_from"
        )
    own = adapter.own_hyper_parameters({key: value for key, value in saved.items() if key != KIND})
    return {key: _like(group.get(key), value) for key, value in own.items()}


def _like(current: Any, value: Any) -> Any:
    """Convert a hyper-parameter read from JSON to the optimizer's type: tuple, tensor or plain value."""
    if isinstance(current, tuple):
        return tuple(value)
    return torch.full_like(current, value) if isinstance(current, Tensor) else value
