"""AmpOptimWrapper: mixed precision by autocast, with loss scaling for float16 only."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from ..core.base.config import check_call
from ..core.base.errors import ConfigError, StrategyError, one_of
from ..core.base.registry import OPTIM_WRAPPERS
from ..core.device.device import DEVICES, overflows_to_inf
from ..core.device.precision import DTYPES, Precision, autocast_computes_in
from ..core.torch_compat.torch_private import GroupedGradScaler, has_values
from . import gradients
from .gradients import ModelGroup
from .wrapper import OptimWrapper

_logger = logging.getLogger("flextrain")


def _by_layout(optimizer: Any) -> list[list[Tensor]]:
    return gradients.by_layout([p for group in optimizer.param_groups for p in group["params"]])


class LossScaler:
    """torch's GradScaler, with an optional fixed factor; ``step`` tells whether the update was made.

    Args:
        loss_scale: "dynamic", a fixed factor, or keyword arguments of ``torch.amp.GradScaler``.
        device_type: type of the loss's device.
    """

    def __init__(self, loss_scale: float | dict[str, Any] | Literal["dynamic"], device_type: str) -> None:
        arguments = loss_scale if isinstance(loss_scale, dict) else {}
        self._fixed = None if isinstance(loss_scale, (dict, str)) else float(loss_scale)
        if self._fixed is not None:
            arguments = {"init_scale": self._fixed}
        self._arguments = arguments
        self._device_type = device_type
        self._scaler: GradScaler = GroupedGradScaler(_by_layout, device_type, **arguments)
        self._applied = False

    @property
    def scaler(self) -> GradScaler:
        """The optimizer's own scaler, or torch's."""
        return self._scaler

    def suit(self, own: Callable[..., GradScaler] | None, where: str) -> None:
        """Use the optimizer's own class of scaler, if it has one; call it before the first ``scale``.

        Raises:
            StrategyError: torch's scaler cannot detect an overflow on this device.
        """
        if own is not None:
            self._scaler = own(**self._arguments)
        elif not overflows_to_inf(self._device_type):
            raise StrategyError(
                f"{where}: float16 needs loss scaling, which looks for inf, and this {self._device_type} stops at the "
                "largest number; set INF_NAN_MODE_ENABLE=1 where the chip has that, or choose one of torch_npu's "
                "optimizers (NpuFusedAdamW, ...), whose scaler asks the chip"
            )

    def spread(self, model_group: ModelGroup, where: str) -> None:
        """Skip an update on all processes of the group if a gradient on any of them is not finite.

        Raises:
            StrategyError: the optimizer has a scaler of its own.
        """
        if not isinstance(self._scaler, GroupedGradScaler):
            raise StrategyError(
                f"{where}: this optimizer's own float16 loss scaling cannot combine overflows of processes that hold "
                "different parameters, choose bfloat16 or one of torch's optimizers"
            )
        self._scaler.agree = model_group.any
        self._scaler.scale(torch.zeros((), device=model_group.device))  # creates the scale on a process without a loss

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss times the current factor."""
        return self._scaler.scale(loss)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients by the factor and record whether any is not finite."""
        self._scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Update unless a gradient is not finite; returns whether the update was made."""
        # GradScaler.step does not return this. Comparing scales would copy them to the host twice; the hook runs only
        # if the optimizer steps.
        self._applied = False
        handle = optimizer.register_step_post_hook(self._note)
        try:
            self._scaler.step(optimizer)
        finally:
            handle.remove()
        self._scaler.update(self._fixed)
        return self._applied

    def _note(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        # A fused optimizer is always stepped; its kernel reads this attribute and changes nothing after an overflow.
        overflow = getattr(optimizer, "found_inf", None)
        self._applied = overflow is None or not has_values(overflow) or not bool(overflow)

    def state_dict(self) -> dict[str, Any]:
        """Return GradScaler's own state: plain numbers."""
        return self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict``, which may come from another class of scaler; its settings hold, as those of an optimizer do."""
        needed = {key: state[key] for key in ("scale", "_growth_tracker")}
        own = self._scaler.state_dict()
        if other := [key for key in own if key not in needed and state.get(key, own[key]) != own[key]]:
            settings = ", ".join(f"{key} {state[key]} instead of {own[key]}" for key in other)
            _logger.warning(
                f"The loss scale continues with the checkpoint's settings, not the configuration's: {settings}"
            )
        self._scaler.load_state_dict({**own, **state, **needed})


@OPTIM_WRAPPERS.register_module()
class AmpOptimWrapper(OptimWrapper):
    """Mixed precision: forward under autocast, parameters and optimizer state in float32, loss scaling for float16.

    Args:
        optimizer, accumulative_counts, clip_grad, paramwise_cfg, constructor: see OptimWrapper.
        dtype: "float16", "bfloat16", or None: bfloat16 if the device has it and no ``loss_scale`` is given, else float16.
        loss_scale: for float16: "dynamic" (default), a fixed factor, or arguments of ``torch.amp.GradScaler``.

    Source: Micikevicius et al., "Mixed Precision Training", 2018; https://pytorch.org/docs/stable/amp.html
    """

    _decided_by = "dtype"
    """The argument that decides on the precision, for messages."""
    _scaler: LossScaler | None = None

    def __init__(
        self,
        optimizer: Any,
        accumulative_counts: float = 1,
        clip_grad: dict[str, Any] | None = None,
        paramwise_cfg: dict[str, Any] | None = None,
        constructor: Any = "DefaultOptimWrapperConstructor",
        dtype: Literal["float16", "bfloat16"] | None = None,
        loss_scale: float | int | dict[str, Any] | Literal["dynamic"] | None = None,
        *,
        where: str = "optim_wrapper",
    ) -> None:
        super().__init__(optimizer, accumulative_counts, clip_grad, paramwise_cfg, constructor, where=where)
        if loss_scale is not None and dtype == "bfloat16":
            raise ConfigError(f"{where}.loss_scale: has no meaning with bfloat16, which needs no loss scaling")
        if isinstance(loss_scale, dict):
            check_call(GradScaler, loss_scale, f"{where}.loss_scale", provided=("device",))
        if isinstance(loss_scale, str) and loss_scale != "dynamic":
            raise ConfigError(f'{where}.loss_scale: "{loss_scale}" is not allowed, give "dynamic", a number or a dict')
        if isinstance(loss_scale, (int, float)) and loss_scale <= 0:
            raise ConfigError(f"{where}.loss_scale: {loss_scale} is not allowed, give a number above 0")
        self._asked_dtype = None if dtype is None else getattr(torch, dtype)
        self._dtype = self._asked_dtype
        self._loss_scale = loss_scale

    @property
    def loss_scale(self) -> float | dict[str, Any] | Literal["dynamic"] | None:
        """The ``loss_scale`` argument as given."""
        return self._loss_scale

    @property
    def chose_dtype(self) -> bool:
        """Whether the dtype is the device's, because neither it was given nor ``loss_scale``, which means float16."""
        return self._asked_dtype is None and self._loss_scale is None

    @property
    def loss_scaler(self) -> GradScaler | None:
        """The scaler of float16 losses, whose ``get_scale()`` is the factor; None for bfloat16.

        It exists from set-up on; without a strategy, as soon as there is an optimizer.
        """
        self._attach_to_parameters()
        return self._scaler.scaler if self._scaler else None

    @property
    def cast_dtype(self) -> torch.dtype | None:
        """The dtype of autocast; None while neither an argument nor the device has decided."""
        return self._dtype

    @property
    def precision(self) -> Precision:
        """Compute in the low-precision dtype under autocast; a loss scale for float16, dynamic by default."""
        if self._dtype is not torch.float16:
            return Precision(compute=self._dtype)
        scale = "dynamic" if self._loss_scale is None or isinstance(self._loss_scale, dict) else self._loss_scale
        return Precision(compute=self._dtype, loss_scale=scale)

    def attach(self, device: torch.device, autocast: Callable[[], AbstractContextManager[None]]) -> None:
        """See OptimWrapper; also chooses the dtype if None was given, and creates the scaler.

        Raises:
            StrategyError: autocast does not compute in that dtype on this device.
        """
        super().attach(device, autocast)
        self._dtype = self._asked_dtype
        if self._dtype is None:
            self._dtype = DEVICES[device.type].autocast_dtype or self._dtype_on(device)
            if self._loss_scale is not None and self._dtype is not torch.float16:
                raise ConfigError(
                    f"{self.where}.loss_scale: has no meaning with {self._dtype}, the default on {device.type}"
                )
        assert self._dtype is not None
        if self.precision.autocast and not autocast_computes_in(device.type, self._dtype):
            others = [name for name in ("float16", "bfloat16") if autocast_computes_in(device.type, DTYPES[name])]
            advice = one_of(others) if others else "OptimWrapper, which computes in float32"
            raise StrategyError(
                f"{self.where}.dtype: autocast on {device.type} does not compute in {self._dtype}, choose {advice}"
            )
        before, self._scaler = self._scaler, None
        if self._dtype is torch.float16:
            self._scaler = LossScaler(self._loss_scale or "dynamic", device.type)
            if before:
                self._scaler.load_state_dict(before.state_dict())

    def _dtype_on(self, device: torch.device) -> torch.dtype:
        from ..core.device.accelerator import has_bfloat16

        return torch.bfloat16 if self._loss_scale is None and has_bfloat16(device) else torch.float16

    def optim_context(self, model: nn.Module) -> AbstractContextManager[None]:
        """See OptimWrapper; without a strategy, autocast on the device of the model's parameters."""
        if self._autocast is None:
            self._attach_alone(next(model.parameters()).device)
        return super().optim_context(model)

    def _attach_to_parameters(self) -> None:
        """Call ``attach`` for the device of the optimizer's parameters, when no strategy has called it."""
        if self._autocast is None and self._optimizer is not None:
            self._attach_alone(self._optimizer.param_groups[0]["params"][0].device)

    def _attach_alone(self, device: torch.device) -> None:
        """Call ``attach`` with plain autocast, when no strategy has called it."""
        self.attach(device, lambda: torch.autocast(device.type, self._dtype, enabled=self.precision.autocast))

    def build(self, model: nn.Module) -> None:
        """See OptimWrapper; uses the optimizer's own scaler, if it has one."""
        super().build(model)
        if self._scaler:
            self._scaler.suit(self.adapter.grad_scaler, f"{self.where}.{self._decided_by}")

    def spread(self, model_group: ModelGroup) -> None:
        """See OptimWrapper; loss scaling combines overflows too."""
        super().spread(model_group)
        if self._scaler:
            self._scaler.spread(model_group, f"{self.where}.{self._decided_by}")

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        """See OptimWrapper; float16 losses are scaled first."""
        if self._autocast is None:
            self._attach_alone(loss.device)
        super().backward(self._scaler.scale(loss) if self._scaler else loss, retain_graph=retain_graph)

    def _unscale(self) -> None:
        if self._scaler:
            self._scaler.unscale(self.optimizer)

    def _apply(self) -> bool:
        if self._scaler is None:
            return super()._apply()
        with self.adapter.stepping():
            return self._scaler.step(self.optimizer)

    def plain_values(self) -> dict[str, Any]:
        """Return the loss scale and its growth counter under float16, an empty dict otherwise."""
        self._attach_to_parameters()
        return {"scaler": self._scaler.state_dict()} if self._scaler else {}

    def load_plain_values(self, state: dict[str, Any]) -> None:
        """Continue from ``plain_values``; if it has no scaler, the loss scale starts from its initial value."""
        self._attach_to_parameters()
        if self._scaler and state.get("scaler"):
            self._scaler.load_state_dict(state["scaler"])
        elif state.get("scaler") and self.chose_dtype:
            _logger.warning(
                f'{self.where}: the checkpoint was trained in float16 and goes on in {self._dtype}; dtype="float16" keeps it'
            )


# ApexOptimWrapper: NVIDIA Apex's optimization levels O0 and O1, implemented with torch's autocast and GradScaler.


_UNUSED = {
    "keep_batchnorm_fp32": "normalisation layers are float32 at both levels",
    "cast_model_type": "the level decides it",
    "patch_torch_functions": "autocast takes its place at level O1",
    "cast_model_outputs": "outputs are float32, and at level O1 what autocast makes them",
    "min_loss_scale": "torch's GradScaler has no bounds",
    "max_loss_scale": "torch's GradScaler has no bounds",
}


@OPTIM_WRAPPERS.register_module()
class ApexOptimWrapper(AmpOptimWrapper):
    """Runs configurations written for Apex; new ones should use AmpOptimWrapper. Parameters are float32.

    Args:
        optimizer, accumulative_counts, clip_grad, paramwise_cfg, constructor: see OptimWrapper.
        opt_level: "O0" computes in float32; "O1", the default, in float16 under autocast, with a dynamic loss scale. O2 and O3,
            whose parameters are float16, are refused.
        loss_scale: "dynamic" or a fixed factor in place of the level's, for O1.
        enabled: False means O0.
        master_weights: only False: parameters are float32 themselves.
        num_losses: only 1.
        verbosity: how much Apex prints; has no effect here.
        keep_batchnorm_fp32, cast_model_type, patch_torch_functions, cast_model_outputs: only None, the level says it.
        min_loss_scale, max_loss_scale: only None, torch's GradScaler has no bounds.

    Source: https://nvidia.github.io/apex/amp.html
    """

    _decided_by = "opt_level"

    def __init__(
        self,
        optimizer: Any,
        accumulative_counts: float = 1,
        clip_grad: dict[str, Any] | None = None,
        paramwise_cfg: dict[str, Any] | None = None,
        constructor: Any = "DefaultOptimWrapperConstructor",
        opt_level: Literal["O0", "O1", "O2", "O3"] = "O1",
        loss_scale: float | int | Literal["dynamic"] | None = None,
        enabled: bool = True,
        keep_batchnorm_fp32: bool | None = None,
        master_weights: bool | None = None,
        num_losses: int = 1,
        verbosity: int = 1,
        cast_model_type: Any = None,
        patch_torch_functions: Any = None,
        cast_model_outputs: Any = None,
        min_loss_scale: Any = None,
        max_loss_scale: Any = None,
        *,
        where: str = "optim_wrapper",
    ) -> None:
        level = opt_level if enabled else "O0"
        scale = loss_scale or "dynamic" if level == "O1" else None
        super().__init__(
            optimizer, accumulative_counts, clip_grad, paramwise_cfg, constructor, "float16", scale, where=where
        )
        given = {
            "keep_batchnorm_fp32": keep_batchnorm_fp32,
            "cast_model_type": cast_model_type,
            "patch_torch_functions": patch_torch_functions,
            "cast_model_outputs": cast_model_outputs,
            "min_loss_scale": min_loss_scale,
            "max_loss_scale": max_loss_scale,
        }
        if level in ("O2", "O3"):
            raise ConfigError(
                f'{where}.opt_level: "{level}" is not allowed, parameters stay in float32; choose O1, or strategy="zero1" with '
                "fp16=dict(enabled=True), which has float16 parameters and float32 masters"
            )
        for name, value in given.items():
            if value is not None:
                raise ConfigError(f"{where}.{name}: has no meaning here, {_UNUSED[name]}; leave it out")
        if num_losses != 1:
            raise ConfigError(
                f"{where}.num_losses: {num_losses} is not allowed, use an OptimWrapperDict for several losses"
            )
        if loss_scale not in (None, 1, 1.0) and level == "O0":
            raise ConfigError(f'{where}.loss_scale: has no meaning with opt_level="O0", choose O1')
        if master_weights:
            raise ConfigError(f'{where}.master_weights: True is not allowed with opt_level="{level}"')
        self.opt_level = level
        if level == "O0":
            self._asked_dtype = self._dtype = torch.float32
