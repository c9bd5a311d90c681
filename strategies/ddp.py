"""DDPStrategy: the whole model in every process, gradients averaged during backward (DistributedDataParallel)."""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, ClassVar, Literal, cast

import pydantic
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..core.base.config import Config
from ..core.base.errors import ConfigError, StrategyError
from ..core.base.registry import STRATEGIES
from ..core.device.precision import BATCH_NORM
from ..core.model.base_model import calls_itself
from ..core.torch_compat.torch_private import check_reduced, gradient_hooks, leave_to_others
from ..optim.wrapper import OptimWrapper
from .added_parameters import refuse_added
from .base import NOTHING, Optim, Strategy
from .config import ANY_DEVICE, Needs, StrategyConfig
from .gradient_hooks import OwnMeans, StepsInTime, draw_alike
from .lost_writes import tell_of_writes
from .noted import Arranged
from .parts import explain, keep_own_buffers
from .sharding import check_dense, check_not_quantised, check_tables

# Name the trainable parameters that no gradient has come to, in the log.


_logger = logging.getLogger("flextrain")


class WithoutGradient:
    """A hook of an optimizer wrapper's updates that logs the parameters without gradient, when they change.

    Args:
        parameters: the model's, by name.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._before: list[str] = []

    def __call__(self, optim: OptimWrapper) -> None:
        """Look at the gradients of an update, before they are clipped; no value is read."""
        trained = (parameter for group in optim.param_groups for parameter in group["params"])
        names = [self._names[id(p)] for p in trained if p.requires_grad and p.grad is None]
        if names != self._before:
            self._before = names
            if names:
                _logger.warning(
                    f"detect_anomalous_params: no gradient for {', '.join(names)}; forward has not used them, or the loss does "
                    "not depend on them"
                )
            else:
                _logger.warning("detect_anomalous_params: all parameters have gradients again")


# Names of hooks in torch.distributed.algorithms.ddp_comm_hooks.default_hooks.
CommHook = Literal["allreduce", "fp16_compress", "bf16_compress"]


class WrapperOptions(Config):
    """Arguments of torch's DistributedDataParallel; None is torch's default."""

    static_graph: bool | None = None
    """Promise that every iteration uses the same parameters in the same way."""
    find_unused_parameters: bool | None = None
    """Allow iterations that do not use all parameters."""
    gradient_as_bucket_view: bool | None = None
    """Let gradients share memory with the all-reduce buckets; saves one copy of the gradients."""
    broadcast_buffers: bool | None = None
    """Broadcast rank 0's buffers before every forward."""
    bucket_cap_mb: float | int | None = None
    """Size of the all-reduce buckets in MiB."""


_DEVICES = "a process has one device, give strategy.device"
_NOT_TAKEN = {
    "device_ids": _DEVICES,
    "output_device": _DEVICES,
    "dim": "a batch is split by the sampler",
    "process_group": "processes are arranged by the strategy",
    "check_reduction": "torch has dropped it",
    "exclude_keys": "every submodule is wrapped",
}
"""Arguments of DistributedDataParallel and MMEngine's subclasses that have no meaning here, and why."""


class DDPWrapperConfig(WrapperOptions):
    """MMEngine's ``model_wrapper``."""

    type: Any = None
    """Must name DistributedDataParallel or MMEngine's subclass, if given."""
    detect_anomalous_params: bool | None = None
    """The same as the strategy's own detect_anomalous_params."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _taken(cls, given: Any) -> Any:
        for key, why in _NOT_TAKEN.items():
            if isinstance(given, dict) and key in given:
                raise ConfigError(f"strategy.model_wrapper.{key}: has no meaning here, {why}; leave it out")
        return given


class DDPConfig(StrategyConfig, WrapperOptions):
    """Options of DDPStrategy.

    Example:
        strategy=dict(type="DDPStrategy", find_unused_parameters=True)
    """

    model_wrapper: DDPWrapperConfig | None = None
    """MMEngine's key for the arguments of DistributedDataParallel."""
    sync_bn: Literal["torch", "mmcv"] | None = None
    """Batch normalisation over the batches of all processes: both use torch's SyncBatchNorm."""
    detect_anomalous_params: bool | None = None
    """Log the names of trainable parameters that an update has no gradient for, whenever they change."""
    comm_hook: CommHook | None = None
    """Dtype of gradients in the all-reduce: their own, float16 or bfloat16."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> DDPConfig:
        inner = self.model_wrapper
        name = getattr(inner.type, "__name__", inner.type) if inner else None
        if name not in (None, "MMDistributedDataParallel", "DistributedDataParallel"):
            raise ConfigError(f'strategy.model_wrapper.type: "{name}" is not allowed, DDPStrategy wraps with its own')
        for key in (*WrapperOptions.model_fields, "detect_anomalous_params"):
            if inner and getattr(self, key) is not None and getattr(inner, key) not in (None, getattr(self, key)):
                raise ConfigError(
                    f"strategy.model_wrapper.{key}: {getattr(inner, key)} disagrees with "
                    f"strategy.{key}={getattr(self, key)}, give one of them"
                )
        for where, options in (("strategy", self), ("strategy.model_wrapper", inner)):
            size = options.bucket_cap_mb if options else None
            if size is not None and size <= 0:
                raise ConfigError(f"{where}.bucket_cap_mb: {size} is not allowed, give a number above 0")
        return self

    def wrapper_arguments(self) -> dict[str, Any]:
        """Return the arguments for DistributedDataParallel, from the options and from ``model_wrapper``."""
        values = {key: getattr(self, key) for key in WrapperOptions.model_fields}
        if self.model_wrapper:
            values |= {k: v for k in values if (v := getattr(self.model_wrapper, k)) is not None}
        return {key: value for key, value in values.items() if value is not None}

    @property
    def names_anomalous(self) -> bool:
        """Whether parameters without gradient are logged, from the option or from ``model_wrapper``."""
        return bool(self.detect_anomalous_params or (self.model_wrapper and self.model_wrapper.detect_anomalous_params))


@STRATEGIES.register_module()
class DDPStrategy(Strategy):
    """Data parallelism with torch's DistributedDataParallel; one process without launcher has world size 1.

    A model that defines its own ``train_step`` (or ``_run_forward``) calls itself, past any wrapper. Its gradients are
    averaged at each update instead, in buckets, with the same result; and after each backward that ``train_step`` asks for
    apart from an update, as ``optim_wrapper.backward(loss)``.

    Source: https://pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
    """

    Config: ClassVar[type[DDPConfig]] = DDPConfig
    needs = Needs(distributed=True, others=(ANY_DEVICE,))
    short_names = {"ddp": {}}
    config: DDPConfig
    _recorded = False
    _reduced: Sequence[str] = ()

    def _check_request(self, model: nn.Module, optim: Optim | None) -> None:
        if self.topology.data.count > 1:
            check_not_quantised(model, type(self).__name__)
            check_tables(model, type(self).__name__)
        if (
            self.config.sync_bn
            and self.device.type == "cpu"
            and any(isinstance(m, BATCH_NORM) for m in model.modules())
        ):
            raise StrategyError('strategy.sync_bn: torch has it for accelerators only, leave it out on device "cpu"')
        arguments = self.config.wrapper_arguments()
        method = calls_itself(model)
        if method and optim is not None and self.topology.data.count > 1:
            check_dense(model, f"{type(self).__name__} with {type(model).__name__}.{method}", "define forward instead")
        if method and (self.config.comm_hook or arguments):
            given = next(iter(arguments), "comm_hook")
            raise StrategyError(
                f"strategy.{given}: has no effect on {type(model).__name__}, which defines its own {method} and is "
                "therefore not wrapped; leave it out"
            )

    def _wrap(self, model: nn.Module) -> nn.Module:
        data = self.topology.data
        if self.config.sync_bn and data.count > 1:
            self._module = model = nn.SyncBatchNorm.convert_sync_batchnorm(model, data.group)  # type: ignore[no-untyped-call]
        if data.count == 1 or not any(p.requires_grad for p in model.parameters()):
            return model
        if calls_itself(model):
            return model
        hooked = [parameter for parameter in model.parameters() if gradient_hooks(parameter)]
        if hooked:  # they are averaged after backward
            leave_to_others(model, hooked)
        self._reduced = [n for n, p in model.named_parameters() if p.requires_grad and not gradient_hooks(p)]
        if not self._reduced:
            if self.config.wrapper_arguments().get("broadcast_buffers") is not False:
                model.register_forward_pre_hook(self._share_buffers)
            return model
        for module in model.modules():
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
                # torch (2.15) divides a sparse gradient in place, in memory that the gradients of other parameters may share.
                self._gradient_hooks.append(module.weight.register_hook(_in_memory_of_its_own))  # type: ignore[no-untyped-call]
        if not self.config.compile:
            tell_of_writes(model)
        wrapped = DistributedDataParallel(
            model,
            device_ids=self._device_ids(),
            process_group=data.group,
            **self.config.wrapper_arguments(),
        )
        if self.config.comm_hook:
            wrapped.register_comm_hook(None, _comm_hook(self.config.comm_hook))
        return wrapped

    def _share_buffers(self, model: nn.Module, args: Any) -> None:
        if model.training and torch.is_grad_enabled():
            self.topology.data.share([buffer.data for buffer in model.buffers()])

    def _device_ids(self) -> list[torch.device] | None:
        """Return this process's device in a list; None on the CPU, as DistributedDataParallel requires."""
        return None if self.device.type == "cpu" else [self.device]

    def setup(self, model: nn.Module, optim: Optim | None = None) -> tuple[nn.Module, Optim | None]:
        """See Strategy."""
        called, optim = super().setup(model, optim)
        self._check_gradients_stay(optim)
        # First, because averaging gives zeros to parameters that have a gradient in another process.
        if self.config.names_anomalous and optim is not None:
            for wrapper in optim.wrappers.values():
                wrapper.register_step_pre_hook(WithoutGradient(dict(self.module.named_parameters())))
        if isinstance(self._model, DistributedDataParallel):
            for wrapper in optim.wrappers.values() if optim is not None else ():
                wrapper.register_step_pre_hook(self._check_reduced)  # before the update, not in the next forward
        if self.topology.data.count > 1 and optim is not None:
            for wrapper in optim.wrappers.values():
                if calls_itself(self.module):  # averages whatever the optimizer has
                    self._gradient_hooks += [
                        StepsInTime(wrapper),
                        OwnMeans(wrapper, partial(_trained, wrapper), self.topology.data),
                    ]
                else:
                    refuse_added(wrapper, self.module)
                draw_alike(self, wrapper, self.topology.data)
        return called, optim

    def _arranged(self) -> Arranged:
        if self.topology.data.count == 1:
            return Arranged()
        hooked = "which gets the gradients of one process only; register it in the model's __init__ or in a transform"
        if not isinstance(self._model, DistributedDataParallel):
            return Arranged(hooked=hooked)
        finds_unused = self.config.wrapper_arguments().get("find_unused_parameters")
        return Arranged(
            thawed="so its gradients are averaged over no other process",
            frozen="" if finds_unused else "so that processes wait for its gradient",
            hooked=hooked,
        )

    def _check_gradients_stay(self, optim: Optim | None) -> None:
        """Raise StrategyError if gradients could move or be missing with an optimizer that keeps them in own memory."""
        arguments = self.config.wrapper_arguments()
        if self.config.names_anomalous:
            arguments["detect_anomalous_params"] = True
        needs_own = ("gradient_as_bucket_view", "find_unused_parameters", "detect_anomalous_params")
        key = next((key for key in needs_own if arguments.get(key)), None)
        for wrapper in optim.wrappers.values() if optim is not None and key else ():
            if wrapper.adapter.owns_gradients:
                kind = type(wrapper.optimizer).__name__
                raise StrategyError(
                    f"strategy.{key}: {kind} keeps all gradients in memory of its own, leave it out or choose one of "
                    "torch's optimizers"
                )

    def grad_sync(self, enabled: bool) -> AbstractContextManager[None]:
        """See Strategy; returns ``DistributedDataParallel.no_sync`` if disabled."""
        if enabled or not isinstance(self._model, DistributedDataParallel):
            return NOTHING
        # torch (2.15) records a static graph in the first backward, and fails there under no_sync. One more reduction
        # does not change the window's sum.
        if self._model.static_graph and not self._recorded:
            self._recorded = True
            return NOTHING
        return self._model.no_sync()

    def _check_reduced(self, optim: OptimWrapper) -> None:
        try:
            check_reduced(cast(DistributedDataParallel, self._model))
        except RuntimeError as error:
            if (advice := explain(self, error)) is None:
                raise
            raise StrategyError(f"model: rank {self.topology.rank} cannot reduce its gradients, {advice}") from error


@keep_own_buffers.register(DDPStrategy)
def _(strategy: DDPStrategy) -> None:
    """Let the wrapper broadcast no buffers: it would give every process rank 0's before every forward."""
    model = strategy._model
    if isinstance(model, DistributedDataParallel) and "broadcast_buffers" not in strategy.config.wrapper_arguments():
        model.broadcast_buffers = False


@explain.register(DDPStrategy)
def _(strategy: DDPStrategy, error: BaseException) -> str | None:
    text = str(error)
    if "Expected to have finished reduction in the prior iteration" in text:
        names = strategy._reduced
        found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", text)
        unused = [names[int(index)] for index in found[1].split() if int(index) < len(names)] if found else []
        which = ", ".join(unused[:8]) + (", ..." if len(unused) > 8 else "") if unused else "some parameters"
        return (
            f"the loss does not depend on {which}: use them, freeze them (requires_grad=False), or give "
            "strategy.find_unused_parameters=True"
        )
    if "Your training graph has changed in this iteration" in text:
        return "this iteration uses other parameters than the first one: leave out strategy.static_graph"
    if "Expected to mark a variable ready only once" in text:
        return (
            "a parameter is used again in a checkpointed part of the model: give checkpoint(..., use_reentrant=False), or "
            "strategy.static_graph=True"
        )
    return explain.dispatch(Strategy)(strategy, error)


def _trained(optim: OptimWrapper) -> list[Tensor]:
    return [parameter for group in optim.param_groups for parameter in group["params"]]


def _in_memory_of_its_own(gradient: Tensor) -> Tensor:
    return gradient.clone()


def _comm_hook(name: CommHook) -> Callable[..., Any]:
    hooks = importlib.import_module("torch.distributed.algorithms.ddp_comm_hooks.default_hooks")
    return getattr(hooks, f"{name}_hook")  # type: ignore[no-any-return]
