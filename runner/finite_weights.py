"""Names of weights, statistics and averages that must stay finite; masks may hold infinity on purpose."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..core.comm import collectives as dist
from ..core.finite import nonfinite
from ..core.normalisation_layers import running_statistics
from ..optim.canonical import STATE

if TYPE_CHECKING:
    from .run import Run

_AVERAGED = "averaged."


def averaged_name(key: str) -> str:
    """Return the weight or buffer whose average a hook's state has under ``key``; "" if it has none."""
    return key.partition(_AVERAGED)[2]


def trained_names(runner: Run) -> set[str]:
    """Return the names of tensors that training changes: parameters that are not frozen, and running statistics."""
    module = runner.strategy.module
    names = {name for name, parameter in runner.strategy.named_parameters() if parameter.requires_grad}
    return names | running_statistics(module).keys()


def keys_to_keep_finite(runner: Run, state: Mapping[str, Any]) -> set[str]:
    """Return the keys of a checkpoint that must be finite to resume from it.

    These are trained tensors, their optimizer state, and averages. A buffer or a frozen parameter may be a mask of
    minus infinity, and single numbers in the optimizer state may have any value.
    """
    names = trained_names(runner)
    hooks = tuple(f"hook.{type(hook).__name__}" for hook in runner.hooks if hook.holds_weights)
    return {
        key
        for key, value in state.items()
        if isinstance(value, Tensor)
        and (
            key.removeprefix("model.") in names
            or (key.startswith(STATE) and value.dim() > 0)
            or (hooks and key.startswith(hooks) and averaged_name(key) in names)
        )
    }


def own_nonfinite(runner: Run) -> list[str]:
    """Return the names of weights, statistics and averages that are not finite in this process's part."""
    return nonfinite(_watched(runner))


def nonfinite_weights(runner: Run) -> list[str]:
    """Return the names of weights, statistics and averages that are not finite on any process; a collective."""
    found = dict.fromkeys(name for names in dist.all_gather_object(own_nonfinite(runner)) for name in names)
    own = [name for name in _watched(runner) if name in found]
    return [*own, *(name for name in found if name not in own)]


def _watched(runner: Run) -> dict[str, Tensor]:
    names = trained_names(runner)
    watched = {name: tensor for name, tensor in runner.strategy.model_state().items() if name in names}
    for state in (hook.state_dict() for hook in runner.hooks if hook.holds_weights):
        watched |= {key: value for key, value in state.items() if averaged_name(key) in names}
    return watched
