"""StrategyConfig: the options that every strategy has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pydantic
import torch
from torch import nn

from ..core.config import Config, check_call
from ..core.errors import ConfigError


class ActivationCheckpointing(Config):
    """Which submodules are recomputed in backward."""

    check_fn: Callable[[nn.Module], bool] | None = None
    """Says of a submodule whether to recompute it."""
    classes: list[str] | None = None
    """Names of submodules' classes to recompute; in place of check_fn."""

    @pydantic.model_validator(mode="after")
    def _one_way(self) -> ActivationCheckpointing:
        if (self.check_fn is None) == (self.classes is None):
            raise ConfigError("strategy.activation_checkpointing.check_fn: give either check_fn or classes")
        return self


class StrategyConfig(Config):
    """Options of every strategy."""

    device: str | None = None
    """Kind of device: "cpu", "cuda", "npu", "xpu", "mps" or a registered one; None takes the accelerator that is here, else
    the CPU."""
    launcher: str | None = None
    """Who started the processes: "none", "pytorch", "slurm" or "mpi"; None finds out."""
    backend: str | None = None
    """Process-group back end, such as "nccl"; gloo carries what is on the CPU if it does not. None takes the device's."""
    timeout_s: float | int = pydantic.Field(1800.0, gt=0)
    """Seconds after which a process that waits for others gives up."""
    activation_checkpointing: ActivationCheckpointing | None = None
    """Recompute activations in backward: ``dict(classes=["Block"])`` or ``dict(check_fn=...)``."""
    compile: bool | dict[str, Any] = False
    """True, or arguments of ``torch.compile``."""
    exclude_frozen_parameters: bool | None = None
    """Leave frozen parameters out of checkpoints; a run that resumes has them from its model, as that is built. None: False."""

    @pydantic.field_validator("compile")
    @classmethod
    def _torch_knows(cls, options: bool | dict[str, Any]) -> bool | dict[str, Any]:
        if isinstance(options, dict):
            check_call(torch.compile, options, "strategy.compile", ("model",))
        return options
