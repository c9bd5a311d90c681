"""StrategyConfig: the options that every strategy has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pydantic
import torch
from torch import nn

from ..core.config import Config, check_call
from ..core.errors import ConfigError
from .functions import function_of

_FIRST = ("module",)
_OF_THE_RUNNER = {
    "work_dir": "give work_dir",
    "experiment_name": "give experiment_name",
    "env_kwargs": "give env_cfg, randomness and launcher",
    "log_kwargs": "give log_level and log_processor",
    "auto_scale_lr": "give auto_scale_lr",
}
"""Arguments of MMEngine's strategies that are the runner's here."""


class ActivationCheckpointing(Config):
    """The submodules to recompute in backward."""

    check_fn: Callable[[nn.Module], bool] | None = None
    """Returns whether to recompute a submodule; a function, its name in FUNCTIONS, or ``dict(type=..., **arguments)``."""
    classes: list[str] | None = None
    """Names of the classes to recompute; instead of check_fn."""

    @pydantic.field_validator("check_fn", mode="before")
    @classmethod
    def _by_name(cls, given: Any) -> Any:
        return None if given is None else function_of(given, "strategy.activation_checkpointing.check_fn", _FIRST)

    @pydantic.model_validator(mode="after")
    def _one_way(self) -> ActivationCheckpointing:
        if (self.check_fn is None) == (self.classes is None):
            raise ConfigError("strategy.activation_checkpointing.check_fn: give either check_fn or classes")
        return self


class StrategyConfig(Config):
    """Options of every strategy."""

    device: str | None = None
    """Type of device: "cpu", "cuda", "npu", "xpu", "mps" or a registered one; None: the available accelerator, else the
    CPU."""
    launcher: str | None = None
    """Launcher of the processes: "none", "pytorch", "slurm" or "mpi"; None: detected from the environment."""
    backend: str | None = None
    """Backend of the process group, such as "nccl"; gloo is added for CPU tensors if needed. None: the device's own."""
    timeout_s: float | int = pydantic.Field(1800.0, gt=0)
    """Seconds after which waiting for other processes fails."""
    activation_checkpointing: ActivationCheckpointing | Literal["model"] | None = None
    """Recompute activations in backward: ``dict(classes=["Block"])`` or ``dict(check_fn=...)``; "model": what the model's own switch
    chooses, such as ``gradient_checkpointing_enable`` of transformers. A model of transformers then trains without a cache of keys
    and values."""
    compile: bool | dict[str, Any] = False
    """True, or arguments of ``torch.compile``."""
    exclude_frozen_parameters: bool | None = None
    """Leave frozen parameters out of checkpoints; a resumed run takes them from its newly built model, and raises
    if they are not those of the run that saved. None: False."""

    @property
    def own_dtype(self) -> torch.dtype | None:
        """The dtype in which options of the strategy itself let it compute; None: that of the optim_wrapper."""
        return None

    @pydantic.model_validator(mode="before")
    @classmethod
    def _not_of_the_runner(cls, given: Any) -> Any:
        for key, instead in _OF_THE_RUNNER.items():
            if isinstance(given, dict) and key in given:
                raise ConfigError(f"strategy.{key}: belongs to the runner, {instead} there")
        return given

    @pydantic.field_validator("compile")
    @classmethod
    def _torch_knows(cls, options: bool | dict[str, Any]) -> bool | dict[str, Any]:
        if isinstance(options, dict):
            check_call(torch.compile, options, "strategy.compile", ("model",))
        return options
