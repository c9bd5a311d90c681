"""TwinAdapter: an optimizer from elsewhere that computes what one of torch's own does, in that one's checkpoints."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...core.errors import CheckpointError
from .base import OptimizerAdapter


class TwinAdapter(OptimizerAdapter):
    """State and settings as the twin in torch.optim has them, so that each goes on from the other's checkpoint.

    The number of updates is a plain number in the optimizer, and a 0-dim float32 tensor in a checkpoint as in torch's own.
    """

    @property
    def kind(self) -> str:
        """The optimizer's own name."""
        return type(self.optimizer).__name__

    @property
    def twin(self) -> str | None:
        """The name of the one in torch.optim; None where none computes the same."""
        return None

    @property
    def is_elementwise(self) -> bool:
        """See OptimizerAdapter; what computes as its twin does is."""
        return self.twin is not None or super().is_elementwise

    @property
    def name(self) -> str:
        """See OptimizerAdapter."""
        return self.twin or self.kind

    def can_set(self, key: str) -> bool:
        """Whether the twin's setting ``key`` is one of this optimizer's too."""
        return key in self.optimizer.param_groups[0]

    def steps(self, parameter: Tensor, of_state: int) -> int:
        """The updates that were made of a parameter, whose state says ``of_state``."""
        return of_state

    def state_of(self, parameter: Tensor) -> Mapping[str, Any]:
        """See OptimizerAdapter."""
        state = dict(self.optimizer.state.get(parameter, {}))
        if "step" in state:
            state["step"] = torch.tensor(float(self.steps(parameter, state["step"])))
        return state

    def settings_of(self, group: Mapping[str, Any]) -> Mapping[str, Any]:
        """See OptimizerAdapter."""
        return {**_defaults(self.twin), **group}

    def own_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """See OptimizerAdapter."""
        return {key: int(value) if key == "step" else value for key, value in state.items()}

    def own_settings(self, settings: dict[str, Any]) -> dict[str, Any]:
        """See OptimizerAdapter."""
        settings = dict(settings)
        for key, default in _defaults(self.twin).items():
            if key in settings and not self.can_set(key):
                value = settings.pop(key)
                if value != default:
                    raise CheckpointError(
                        f"optimizer: the checkpoint's {self.name} has {key}={value}, which {self.kind} cannot do; "
                        f'choose "{self.name}"'
                    )
        return settings


@functools.cache
def _defaults(twin: str | None) -> dict[str, Any]:
    """The settings that an optimizer of torch's own has if none is given."""
    if twin is None:
        return {}
    return dict(getattr(torch.optim, twin)([nn.Parameter(torch.zeros(()))], lr=1.0).defaults)
