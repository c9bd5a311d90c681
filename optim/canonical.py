"""The optimizer in a checkpoint: the keys of its state, and hyper-parameters out of and into parameter groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..core.errors import CheckpointError
from .adapters.base import OptimizerAdapter

STATE = "optim.state."
"""``optim.state.<parameter>.<key>``: what the optimizer keeps of a parameter."""
GROUP = "optim.group."
"""``optim.group.<parameter>.<key>``: the hyper-parameters in force for it."""
KIND = "optimizer"
"""``optim.group.<parameter>.optimizer``: the class of its optimizer."""

# How an optimizer does its arithmetic, not what it computes: belongs to the machine, not to a checkpoint.
_IMPLEMENTATION_KEYS = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})


def split_key(key: str) -> tuple[str, str, str]:
    """(``STATE`` or ``GROUP``, parameter, key) of a key of a checkpoint; three empty strings for any other."""
    for prefix in (STATE, GROUP):
        if key.startswith(prefix):
            parameter, _, item = key.removeprefix(prefix).rpartition(".")
            return prefix, parameter, item
    return "", "", ""


def hyper_parameters(adapter: OptimizerAdapter, group: Mapping[str, Any], parameter: str) -> dict[str, Any]:
    """The hyper-parameters of a group and the class of its optimizer, as a checkpoint has them for one parameter."""
    values = {key: value for key, value in adapter.settings_of(group).items() if key not in _IMPLEMENTATION_KEYS}
    # torch takes a 0-dim tensor as learning rate, which the next run may want as a number.
    plain = {key: value.item() if isinstance(value, Tensor) else value for key, value in values.items()}
    return {f"{GROUP}{parameter}.{key}": value for key, value in ({KIND: adapter.name} | plain).items()}


def restored_hyper_parameters(
    adapter: OptimizerAdapter, group: Mapping[str, Any], saved: Mapping[str, Any]
) -> dict[str, Any]:
    """What a checkpoint has of a parameter's hyper-parameters, in the form in which its group takes them.

    Args:
        adapter: for the optimizer.
        group: stays as it is.
        saved: the values, by the last part of their keys.

    Raises:
        CheckpointError: they are of another class of optimizer.
    """
    kind = saved.get(KIND, adapter.name)
    if kind != adapter.name:
        raise CheckpointError(
            f"optimizer: the checkpoint's is {kind}, the configuration's is {type(adapter.optimizer).__name__}; resume with "
            "the same one, or start from the weights alone with load_from"
        )
    own = adapter.own_settings({key: value for key, value in saved.items() if key != KIND})
    return {key: _like(group.get(key), value) for key, value in own.items()}


def _like(current: Any, value: Any) -> Any:
    """A hyper-parameter as JSON gives it, as the tuple or tensor that the optimizer has for it."""
    if isinstance(current, tuple):
        return tuple(value)
    return torch.full_like(current, value) if isinstance(current, Tensor) else value
