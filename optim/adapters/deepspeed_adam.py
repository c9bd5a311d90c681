"""Adapter of DeepSpeed's FusedAdam and DeepSpeedCPUAdam: their checkpoints are those of torch's AdamW and Adam."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from .equivalent import EquivalentAdapter

_NAMES = ("FusedAdam", "DeepSpeedCPUAdam")


def is_deepspeed_adam(optimizer: Optimizer) -> bool:
    """Return whether it is one of the two; decided by name, because importing DeepSpeed takes seconds."""
    kind = type(optimizer)
    return kind.__name__ in _NAMES and kind.__module__.startswith("deepspeed.")


class DeepSpeedAdamAdapter(EquivalentAdapter):
    """Equivalent to AdamW or, if the decay is added to the gradients, Adam; without bias correction to neither."""

    optimizer: Any  # the class is DeepSpeed's, which mypy does not see

    @property
    def equivalent(self) -> str | None:
        """See EquivalentAdapter."""
        if not all(group["bias_correction"] for group in self.optimizer.param_groups):
            return None
        return "AdamW" if self.optimizer.adam_w_mode else "Adam"

    @property
    def is_elementwise(self) -> bool:
        """See OptimizerAdapter; true without bias correction too."""
        return True

    def can_set(self, key: str) -> bool:
        """See EquivalentAdapter; DeepSpeedCPUAdam has a setting amsgrad, but ignores it."""
        return key != "amsgrad" and super().can_set(key)

    def steps(self, parameter: Tensor, of_state: int) -> int:
        """See EquivalentAdapter; FusedAdam counts the updates of a group in the state of its last parameter only."""
        if self.kind != "FusedAdam":
            return of_state
        state = self.optimizer.state
        for group in self.optimizer.param_groups:
            if any(parameter is own for own in group["params"]):
                return max(int(state[own]["step"]) for own in group["params"] if "step" in state.get(own, {}))
        return of_state  # ZeRO stage 3 adds a parameter to its group only during its update

    def hyper_parameters_of(self, group: Mapping[str, Any]) -> Mapping[str, Any]:
        """See OptimizerAdapter."""
        own = (
            {"step", "bias_correction"} if self.equivalent else {"step"}
        )  # FusedAdam's groups have a step that stays 0
        return {key: value for key, value in super().hyper_parameters_of(group).items() if key not in own}
