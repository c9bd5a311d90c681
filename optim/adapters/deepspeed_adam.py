"""DeepSpeed's FusedAdam and DeepSpeedCPUAdam in the checkpoints of torch's AdamW and Adam."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from .equivalent import TwinAdapter

_NAMES = ("FusedAdam", "DeepSpeedCPUAdam")


def is_deepspeed_adam(optimizer: Optimizer) -> bool:
    """Whether it is one of the two; asked by name, since importing DeepSpeed takes seconds."""
    kind = type(optimizer)
    return kind.__name__ in _NAMES and kind.__module__.startswith("deepspeed.")


class DeepSpeedAdamAdapter(TwinAdapter):
    """AdamW or, with the decay added to the gradients, Adam; without correction of the bias it is neither."""

    optimizer: Any  # the class is DeepSpeed's, which mypy does not see

    @property
    def twin(self) -> str | None:
        """See TwinAdapter."""
        if not all(group["bias_correction"] for group in self.optimizer.param_groups):
            return None
        return "AdamW" if self.optimizer.adam_w_mode else "Adam"

    @property
    def is_elementwise(self) -> bool:
        """See OptimizerAdapter; without correction of the bias too."""
        return True

    def can_set(self, key: str) -> bool:
        """See TwinAdapter; DeepSpeedCPUAdam has amsgrad among its settings and does not look at it."""
        return key != "amsgrad" and super().can_set(key)

    def steps(self, parameter: Tensor, of_state: int) -> int:
        """See TwinAdapter; FusedAdam counts the updates of a group with its last parameter alone."""
        if self.kind != "FusedAdam":
            return of_state
        state = self.optimizer.state
        for group in self.optimizer.param_groups:
            if any(parameter is own for own in group["params"]):
                return max(int(state[own]["step"]) for own in group["params"] if "step" in state.get(own, {}))
        return of_state  # stage 3 of ZeRO puts one into its group only while it is updated

    def settings_of(self, group: Mapping[str, Any]) -> Mapping[str, Any]:
        """See OptimizerAdapter."""
        own = {"step", "bias_correction"} if self.twin else {"step"}  # FusedAdam's groups have a step that stays 0
        return {key: value for key, value in super().settings_of(group).items() if key not in own}
