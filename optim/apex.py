"""ApexOptimWrapper: NVIDIA Apex's optimization levels O0 to O3, implemented with torch's autocast and GradScaler."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..core.errors import ConfigError, StrategyError
from ..core.precision import Precision
from ..core.registry import OPTIM_WRAPPERS
from .amp import LossScaler
from .model_group import ModelGroup
from .param_groups import make_optimizer
from .wrapper import OptimWrapper

_UNUSED = {
    "cast_model_type": "the level decides it",
    "patch_torch_functions": "autocast takes its place at level O1",
    "cast_model_outputs": "outputs are float32, and at level O1 what autocast makes them",
    "min_loss_scale": "torch's GradScaler has no bounds",
    "max_loss_scale": "torch's GradScaler has no bounds",
}


@OPTIM_WRAPPERS.register_module()
class ApexOptimWrapper(OptimWrapper):
    """Runs configurations written for Apex; new ones should use AmpOptimWrapper.

    ===== ================= ================================================= ==========
    level parameters        arithmetic                                        loss scale
    ===== ================= ================================================= ==========
    O0    float32           float32                                           none
    O1    float32           autocast to float16                               dynamic
    O2    float16, with     float16, normalisation layers in float32; the     dynamic
          float32 masters   optimizer updates the masters
    O3    float16           float16                                           none
    ===== ================= ================================================= ==========

    Args:
        optimizer, accumulative_counts, clip_grad, paramwise_cfg, constructor: see OptimWrapper.
        opt_level: the level; default O1.
        loss_scale: "dynamic" or a fixed factor in place of the level's, for O1 and O2.
        enabled: False means O0.
        keep_batchnorm_fp32: normalisation layers stay in float32; default True at O2, False at O3.
        master_weights: only the level's own value is possible: True at O2, False elsewhere.
        num_losses: only 1.
        verbosity: how much Apex prints; has no effect here.
        cast_model_type, patch_torch_functions, cast_model_outputs: only None, the level says it.
        min_loss_scale, max_loss_scale: only None, torch's GradScaler has no bounds.

    Source: https://nvidia.github.io/apex/amp.html
    """

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
        super().__init__(optimizer, accumulative_counts, clip_grad, paramwise_cfg, constructor, where=where)
        given = {
            "cast_model_type": cast_model_type,
            "patch_torch_functions": patch_torch_functions,
            "cast_model_outputs": cast_model_outputs,
            "min_loss_scale": min_loss_scale,
            "max_loss_scale": max_loss_scale,
        }
        for name, value in given.items():
            if value is not None:
                raise ConfigError(f"{where}.{name}: has no meaning here, {_UNUSED[name]}; leave it out")
        if num_losses != 1:
            raise ConfigError(
                f"{where}.num_losses: {num_losses} is not allowed, use an OptimWrapperDict for several losses"
            )
        level = opt_level if enabled else "O0"
        if loss_scale not in (None, 1, 1.0) and level in ("O0", "O3"):
            raise ConfigError(f'{where}.loss_scale: has no meaning with opt_level="{level}", choose O1 or O2')
        if master_weights is not None and master_weights != (level == "O2"):
            raise ConfigError(f'{where}.master_weights: {master_weights} is not allowed with opt_level="{level}"')
        if keep_batchnorm_fp32 is not None and level in ("O0", "O1"):
            raise ConfigError(f'{where}.keep_batchnorm_fp32: has no meaning with opt_level="{level}", choose O2 or O3')
        self.opt_level = level
        self._loss_scale = loss_scale or "dynamic"
        self._keep_norm = keep_batchnorm_fp32 if keep_batchnorm_fp32 is not None else level == "O2"
        self._scaler: LossScaler | None = None
        self._masters: dict[int, Tensor] = {}
        self._pairs: list[tuple[Tensor, Tensor]] = []

    @property
    def precision(self) -> Precision:
        """The dtypes and the loss scale of the level; see the table."""
        half = torch.float16
        if self.opt_level == "O0":
            return Precision()
        if self.opt_level == "O1":
            return Precision(compute=half, loss_scale=self._loss_scale)
        scale = self._loss_scale if self.opt_level == "O2" else None
        return Precision(compute=half, param=half, keep_norm=self._keep_norm, loss_scale=scale)

    def attach(self, device: torch.device, autocast: Callable[[], AbstractContextManager[None]]) -> None:
        """See OptimWrapper; also creates the loss scaler."""
        super().attach(device, autocast)
        if self.precision.loss_scale is not None and self._scaler is None:
            self._scaler = LossScaler(self._loss_scale, device.type)

    def optim_context(self, model: nn.Module) -> AbstractContextManager[None]:
        """See OptimWrapper.

        Raises:
            StrategyError: no strategy has prepared the model for the level.
        """
        if self._autocast is None and self.opt_level != "O0":
            raise StrategyError(
                f'{self.where}.opt_level: "{self.opt_level}" is carried out by a strategy, call '
                "Strategy.setup(model, optim) first"
            )
        return super().optim_context(model)

    def _make(self, model: nn.Module) -> Optimizer:
        if self.opt_level != "O2":
            return super()._make(model)
        return make_optimizer(self._recipe, model, self._make_master)

    def _make_master(self, parameter: Tensor) -> Tensor:
        if parameter.dtype is torch.float32:
            return parameter
        master = nn.Parameter(parameter.detach().float(), requires_grad=parameter.requires_grad)
        self._masters[id(parameter)] = master
        self._pairs.append((parameter, master))
        return master

    def build(self, model: nn.Module) -> None:
        """See OptimWrapper; at O2 the optimizer gets float32 copies of the half-precision parameters."""
        if self.opt_level == "O2" and self.is_built:
            raise ConfigError(f"{self.where}.optimizer: O2 makes its own float32 masters, give dict(type=...)")
        super().build(model)
        if self.opt_level == "O2" and self.adapter.owns_gradients:
            raise StrategyError(
                f"{self.where}.opt_level: O2 gives {type(self.optimizer).__name__} new gradients at every update, which it "
                "does not see; choose O1, or one of torch's optimizers"
            )
        if self._scaler:
            self._scaler.suit(self.adapter.grad_scaler, f"{self.where}.opt_level")

    def spread(self, model_group: ModelGroup) -> None:
        """See OptimWrapper; loss scaling combines overflows too."""
        super().spread(model_group)
        if self._scaler:
            self._scaler.spread(model_group, f"{self.where}.opt_level")

    def model_parameter(self, parameter: Tensor) -> Tensor:
        """See OptimWrapper."""
        return next((model for model, master in self._pairs if master is parameter), parameter)

    def master(self, parameter: Tensor) -> Tensor:
        """See OptimWrapper."""
        return self._masters.get(id(parameter), parameter)

    def refresh(self) -> None:
        """See OptimWrapper."""
        with torch.no_grad():
            for parameter, master in self._pairs:
                parameter.copy_(master)

    def backward(self, loss: Tensor) -> None:
        """See OptimWrapper; the loss is scaled at O1 and O2."""
        super().backward(self._scaler.scale(loss) if self._scaler else loss)

    def _given_gradients(self) -> list[Tensor]:
        models = {id(master): parameter for parameter, master in self._pairs}
        optimized = (p for group in self.param_groups for p in group["params"])
        return [p.grad for p in (models.get(id(p), p) for p in optimized) if p.grad is not None]

    def _unscale(self) -> None:
        for parameter, master in self._pairs:
            master.grad = None if parameter.grad is None else parameter.grad.float()
        if self._scaler:
            self._scaler.unscale(self.optimizer)

    def _apply(self) -> bool:
        applied = self._scaler.step(self.optimizer) if self._scaler else super()._apply()
        if applied:
            self.refresh()
        return applied

    def zero_grad(self) -> None:
        """See OptimWrapper; also drops the gradients of the half-precision parameters."""
        super().zero_grad()
        for parameter, _ in self._pairs:
            parameter.grad = None

    def plain_values(self) -> dict[str, Any]:
        """See OptimWrapper."""
        return {"scaler": self._scaler.state_dict()} if self._scaler else {}

    def load_plain_values(self, state: dict[str, Any]) -> None:
        """See OptimWrapper."""
        if self._scaler and state.get("scaler"):
            self._scaler.load_state_dict(state["scaler"])
