"""StrategyConfig: the options that every strategy has."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pydantic
import torch
from torch import nn

from ..core.base.config import Config, check_call
from ..core.base.errors import ConfigError
from ..core.base.registry import FUNCTIONS

# Needs: the requirements of a strategy, which can be compared with a machine.


ANY_DEVICE = "an accelerator per process or the CPU"


@dataclass(frozen=True)
class Needs:
    """The requirements of a strategy, besides torch.

    Attributes:
        distributed: the strategy needs ``torch.distributed``.
        packages: the optional packages that it imports, each with the command that installs it.
        device: the only type of device that it supports; None: any accelerator, or the CPU.
        others: requirements that cannot be checked, as text.
        processes: why its ranks must be real processes, and can be neither threads nor one rank of many; empty if they can.
    """

    distributed: bool = False
    packages: Mapping[str, str] = field(default_factory=dict)
    device: str | None = None
    others: tuple[str, ...] = ()
    processes: str = ""

    def __str__(self) -> str:
        parts = ["torch.distributed" if self.distributed else "torch"]
        parts += [f"{package} ({command})" for package, command in self.packages.items()]
        return ", ".join((*parts, *self.others))


# Functions of the user's in a strategy's options: given as they are, by name, or as ``dict(type=..., **arguments)``.


def function_of(
    given: Any, where: str, provided: tuple[str, ...] = (), own: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Return the function that an option describes.

    Args:
        given: a function, an object to call, the name of one in FUNCTIONS or its import path, or a dict with a ``type``
            and arguments.
        where: the configuration key.
        provided: parameters that the library fills in at each call.
        own: functions and classes known by name here, besides those of FUNCTIONS. Of a class, an instance is called.

    Raises:
        ConfigError: no such function, or wrong arguments.
    """
    if callable(given) and not inspect.isclass(given):
        return given  # type: ignore[no-any-return]
    if not isinstance(given, (str, Mapping)) and not inspect.isclass(given):
        raise ConfigError(
            f"{where}: {type(given).__name__} is not allowed, give a function, its name, or dict(type=...)"
        )
    if isinstance(given, Mapping) and "type" not in given:
        raise ConfigError(f"{where}.type: missing, say which function")
    kind = given["type"] if isinstance(given, Mapping) else given
    arguments = {key: value for key, value in given.items() if key != "type"} if isinstance(given, Mapping) else {}
    own = own or {}
    key = f"{where}.type" if isinstance(given, Mapping) else where
    function: Any = own[kind] if isinstance(kind, str) and kind in own else FUNCTIONS.resolve(kind, key, own)
    if not inspect.isclass(function):
        check_call(function, arguments, where, provided)
        return functools.partial(function, **arguments) if arguments else function
    check_call(function, arguments, where)
    made = function(**arguments)
    if not callable(made):
        raise ConfigError(f"{key}: {function.__name__} makes nothing that can be called")
    return made


_FIRST = ("module",)
_RECOMPUTE = "strategy.activation_checkpointing"
_OF_THE_RUNNER = {
    "work_dir": "give work_dir",
    "experiment_name": "give experiment_name",
    "env_kwargs": "give env_cfg, randomness and launcher",
    "log_kwargs": "give log_level and log_processor",
    "auto_scale_lr": "give auto_scale_lr",
}
"""Arguments of MMEngine's strategies that are the runner's here."""


POLICIES = ("attention", "matmuls")
"""The policies of ``activation_checkpointing`` that have a name."""


class ActivationCheckpointing(Config):
    """The submodules to recompute in backward; without ``check_fn`` and ``classes`` the model's repeated blocks."""

    check_fn: Callable[[nn.Module], bool] | None = None
    """Returns whether to recompute a submodule; a function, its name in FUNCTIONS, or ``dict(type=..., **arguments)``."""
    classes: list[str] | None = None
    """Names of the classes to recompute; instead of check_fn."""
    policy: Literal["attention", "matmuls"] | Callable[[Any], bool] | None = None
    """Operations whose results are kept and not recomputed: "attention" (every attention kernel), "matmuls" (these, products of
    matrices and convolutions), or a function, given as check_fn is, that gets the operator (``torch.ops.aten.mm.default``) and
    returns True to keep. What draws random numbers is always recomputed. None: all is recomputed."""
    every: int = pydantic.Field(1, ge=1)
    """Take the first of each so many chosen submodules, in their order; 1: all of them."""
    offload: bool = False
    """Let what these submodules keep for backward wait in the host's memory, but for parameters, buffers, and less than 1 MiB."""
    recompute: bool = True
    """False: with ``offload``, recompute nothing, but offload all that is saved."""

    @pydantic.field_validator("check_fn", mode="before")
    @classmethod
    def _by_name(cls, given: Any) -> Any:
        return None if given is None else function_of(given, f"{_RECOMPUTE}.check_fn", _FIRST)

    @pydantic.field_validator("policy", mode="before")
    @classmethod
    def _kept(cls, given: Any) -> Any:
        if given == "model":
            raise ConfigError(f'{_RECOMPUTE}.policy: "model" is no policy, give activation_checkpointing="model" alone')
        if given is None or given in POLICIES:
            return given
        return function_of(given, f"{_RECOMPUTE}.policy", ("operation",), dict.fromkeys(POLICIES))

    @pydantic.model_validator(mode="after")
    def _one_way(self) -> ActivationCheckpointing:
        if self.check_fn is not None and self.classes is not None:
            raise ConfigError(f"{_RECOMPUTE}.check_fn: give either check_fn or classes")
        if not self.recompute and (not self.offload or self.policy is not None):
            given = "a policy" if self.offload else "offload=False"
            raise ConfigError(f"{_RECOMPUTE}.recompute: False is not allowed with {given}, there is nothing to do")
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
    """Seconds after which waiting for other processes fails, in every process group that is made here."""
    activation_checkpointing: ActivationCheckpointing | Literal["model"] | None = None
    """Recompute activations in backward: ``dict(classes=["Block"])`` or ``dict(check_fn=...)``; "attention" or "matmuls": the model's
    repeated blocks, but for such operations, ``dict(policy=...)``; "model": what the model's own switch chooses, such as
    ``gradient_checkpointing_enable`` of transformers. A model of transformers then trains without a cache of keys and values."""
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

    @pydantic.field_validator("activation_checkpointing", mode="before")
    @classmethod
    def _policy_alone(cls, given: Any) -> Any:
        return {"policy": given} if given in POLICIES else given

    @pydantic.field_validator("compile")
    @classmethod
    def _torch_knows(cls, options: bool | dict[str, Any], info: pydantic.ValidationInfo) -> bool | dict[str, Any]:
        if isinstance(options, dict):
            check_call(torch.compile, options, "strategy.compile", ("model",))
            how, mode = info.data.get("activation_checkpointing"), options.get("mode")
            if mode in ("reduce-overhead", "max-autotune") and getattr(how, "offload", False):
                raise ConfigError(
                    f'{_RECOMPUTE}.offload: True is not allowed with compile mode "{mode}", whose CUDA graphs cannot hold copies '
                    'to the host; give mode="default" or "max-autotune-no-cudagraphs"'
                )
        return True if options == {} else options  # everything by default, which must not read as nothing
