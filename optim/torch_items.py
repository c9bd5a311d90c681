"""The state of a checkpoint's optimizer under the names of plain torch, for an export."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from ..core.checkpoint import Checkpoint
from ..core.checkpoint.load.whole_tensors import TensorReader
from ..core.errors import CheckpointError
from .canonical import GROUP, KIND, STATE, split_key

# These choose an implementation for the machine; checkpoints have no value of them, and torch's state has them.
_IMPLEMENTATION_KEYS = ("foreach", "fused", "capturable", "differentiable")


def torch_items(source: Checkpoint) -> dict[str, Callable[[TensorReader], Any]]:
    """Return names of the state and of the hyper parameters of each parameter, with functions that read them.

    The names are those of torch's ``get_optimizer_state_dict`` with
    ``StateDictOptions(flatten_optimizer_state_dict=True)``: ``state.<parameter>.exp_avg``, ``param_groups.<parameter>.lr``.

    Raises:
        CheckpointError: the checkpoint has no optimizer, or one whose names in torch are not known.
    """
    found: dict[str, Callable[[TensorReader], Any]] = {}
    groups: dict[str, dict[str, Any]] = {}
    for key in source.entries:
        prefix, parameter, name = split_key(key)
        if prefix == STATE:
            found[f"state.{parameter}.{name}"] = lambda reader, key=key: reader.read(key)  # type: ignore[misc]
    for key, value in source.values.items():
        prefix, parameter, name = split_key(key)
        if prefix == STATE:
            found[f"state.{parameter}.{name}"] = lambda _, value=value: value  # type: ignore[misc]
        elif prefix == GROUP:
            groups.setdefault(parameter, {})[name] = value
    if not groups:
        raise CheckpointError(f"{source.path}: holds no state of an optimizer, leave out --optimizer")
    defaults: dict[str, dict[str, Any]] = {}
    for parameter, values in groups.items():
        kind = str(values.pop(KIND, ""))
        if kind not in defaults:
            defaults[kind] = _defaults(source, kind)
        for name, value in {**defaults[kind], **values}.items():
            is_pair = isinstance(value, list) and isinstance(defaults[kind].get(name), tuple)
            own = tuple(value) if is_pair else value
            found[f"param_groups.{parameter}.{name}"] = lambda _, own=own: own  # type: ignore[misc]
    return found


def _defaults(source: Checkpoint, kind: str) -> dict[str, Any]:
    """What torch's state of an optimizer has beside a checkpoint's values, and its pairs, which JSON has as lists."""
    made = getattr(torch.optim, kind, None)
    if not (inspect.isclass(made) and issubclass(made, torch.optim.Optimizer)):
        raise CheckpointError(
            f"{source.path}: its optimizer is {kind or 'unknown'}, and only the state of torch.optim's can be written for "
            "plain torch; leave out --optimizer"
        )
    parameters = inspect.signature(made).parameters.items()
    return {
        name: each.default
        for name, each in parameters
        if each.default is not inspect.Parameter.empty
        and (name in _IMPLEMENTATION_KEYS or isinstance(each.default, tuple))
    }
