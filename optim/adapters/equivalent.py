"""EquivalentAdapter: checkpoints of an optimizer that computes the same as one in torch.optim, its equivalent."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...core.errors import CheckpointError
from .base import OptimizerAdapter


class EquivalentAdapter(OptimizerAdapter):
    """Saves state and settings in the form of the equivalent in torch.optim: each can resume from the other's checkpoint.

    The number of updates is a plain number in the optimizer, and a 0-dim float32 tensor in checkpoints, as in the equivalent.
    """

    @property
    def kind(self) -> str:
        """The optimizer's own name."""
        return type(self.optimizer).__name__

    @property
    def equivalent(self) -> str | None:
        """The name of the equivalent optimizer in torch.optim, or None."""
        return None

    @property
    def is_elementwise(self) -> bool:
        """See OptimizerAdapter; true if it has an equivalent, since all of these are elementwise."""
        return self.equivalent is not None or super().is_elementwise

    @property
    def name(self) -> str:
        """See OptimizerAdapter."""
        return self.equivalent or self.kind

    def can_set(self, key: str) -> bool:
        """Return whether this optimizer has the equivalent's setting ``key``."""
        return key in self.optimizer.param_groups[0]

    def steps(self, parameter: Tensor, of_state: int) -> int:
        """Return the number of updates of a parameter, given the number in its state."""
        return of_state

    def state_of(self, parameter: Tensor) -> Mapping[str, Any]:
        """See OptimizerAdapter."""
        state = dict(self.optimizer.state.get(parameter, {}))
        if "step" in state:
            state["step"] = torch.tensor(float(self.steps(parameter, state["step"])))
        return state

    def hyper_parameters_of(self, group: Mapping[str, Any]) -> Mapping[str, Any]:
        """See OptimizerAdapter."""
        return {**_defaults(self.equivalent), **group}

    def own_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """See OptimizerAdapter."""
        return {key: int(value) if key == "step" else value for key, value in state.items()}

    def own_hyper_parameters(self, settings: dict[str, Any]) -> dict[str, Any]:
        """See OptimizerAdapter."""
        settings = dict(settings)
        for key, default in _defaults(self.equivalent).items():
            if key in settings and not self.can_set(key):
                value = settings.pop(key)
                if value != default:
                    raise CheckpointError(
                        f"optimizer: the checkpoint's {self.name} has {key}={value}, which {self.kind} cannot do; "
                        f'choose "{self.name}"'
                    )
        return settings


@functools.cache
def _defaults(equivalent: str | None) -> dict[str, Any]:
    """Return the default settings of an optimizer in torch.optim."""
    if equivalent is None:
        return {}
    return dict(getattr(torch.optim, equivalent)([nn.Parameter(torch.zeros(()))], lr=1.0).defaults)
