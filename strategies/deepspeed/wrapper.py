"""DeepSpeedOptimWrapper: an OptimWrapper whose backward and update are done by DeepSpeed's engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...core import gradients
from ...core.errors import StrategyError
from ...core.overriding import overridden
from ...core.precision import Precision
from ...core.registry import OPTIM_WRAPPERS
from ...optim.param_groups import make_for, make_groups
from ...optim.torch_format import in_strategy
from ...optim.wrapper import ClipGrad, OptimWrapper, StepInfo
from ..gradient_hooks import HooksAfterBackward
from . import engine_internals
from .engine_internals import Fragment
from .updates import BeforeUpdate, before_update


@OPTIM_WRAPPERS.register_module()
class DeepSpeedOptimWrapper(OptimWrapper):
    """The wrapper under DeepSpeedStrategy; precision comes from the strategy's ``bf16`` or ``fp16``.

    In a configuration it is MMEngine's name for an OptimWrapper under DeepSpeed, with OptimWrapper's arguments. OptimWrapper
    and AmpOptimWrapper can be used instead, and work under every strategy.
    """

    _precision: Precision | None = None
    _engine: Any = None
    _fragments: Sequence[Fragment] = ()
    _clips_here = False
    _norm: Tensor | None = None
    _update: BeforeUpdate | None = None

    @classmethod
    def of(cls, asked: OptimWrapper, precision: Precision, accumulate: int) -> DeepSpeedOptimWrapper:
        """Return a wrapper with all attributes of ``asked``, for an engine."""
        wrapper = cls.__new__(cls)
        # The constructor is not called: the arguments are checked already, and ``asked`` may have hooks.
        vars(wrapper).update(vars(asked))
        wrapper._precision, wrapper.accumulate, wrapper._size = precision, accumulate, accumulate
        return wrapper

    @property
    def precision(self) -> Precision:
        """The engine's precision."""
        return self._precision or Precision()

    def attach(self, device: torch.device, autocast: Callable[[], AbstractContextManager[None]]) -> None:
        """See OptimWrapper.

        Raises:
            StrategyError: the strategy has no engine.
        """
        if self._precision is None:
            raise StrategyError(
                f'{self.where}.type: "{type(self).__name__}" works with a DeepSpeed engine only, give OptimWrapper or '
                "AmpOptimWrapper, which every strategy takes"
            )
        super().attach(device, autocast)

    def build(self, model: nn.Module) -> None:
        """See OptimWrapper; does nothing after ``bind``."""
        if self._engine is None:
            super().build(model)
            if self.adapter.owns_gradients:
                raise StrategyError(
                    f"{self.where}.optimizer: {type(self.optimizer).__name__} keeps parameters and gradients in memory of "
                    "its own, and so does DeepSpeed; choose one of torch's optimizers"
                )

    def _make(self, model: nn.Module) -> Optimizer:
        with engine_internals.whole_shapes(model):
            groups = make_groups(self._recipe, model)
        return make_for(self._recipe, groups)

    def bind(self, engine: Any, fragments: Sequence[Fragment], *, clips_here: bool) -> None:
        """Use ``engine`` for backward and update from now on.

        Args:
            clips_here: this wrapper clips the gradients, not the engine.
        """
        self._engine, self._fragments = engine, fragments
        self._optimizer = engine_internals.inner_optimizer(engine)
        self._clips_here = clips_here
        self._update = before_update(engine)
        if clips_here and self.clip_grad is not None:
            # The engine reduces gradients in step(), so they cannot be clipped before it calls the optimizer.
            self._optimizer.register_step_pre_hook(self._clip_before_update)

    def send_last(self, hooks: HooksAfterBackward) -> None:
        """At stage 2: let the engine send parameters with gradient hooks when these were called."""
        cast(Any, self._update).send_last(hooks)

    def clip_by(self, max_norm: float) -> None:
        """Clip gradients by their total norm."""
        self.clip_grad = ClipGrad(max_norm=max_norm)

    def _clip_before_update(self, *_: Any) -> None:
        assert self.clip_grad is not None
        assert self.clip_grad.max_norm is not None
        grads = gradients.gradients(self.param_groups)
        self._norm = gradients.clip_by_norm(grads, float(self.clip_grad.max_norm))

    def backward(self, loss: Tensor) -> None:
        """See OptimWrapper; the engine scales the loss and skips updates that are not finite."""
        for hook in self._backward_pre_hooks:
            hook(loss)
        if self.guard is not None:
            loss = loss * torch.where(loss.detach().isfinite(), 1.0, math.nan)
        self._engine.backward(loss)

    def step(self) -> StepInfo:
        """See OptimWrapper; also reduces gradients that backward has not reduced."""
        for hook in self._step_pre_hooks:
            hook(self)
        self._norm = None
        if self._update is not None:
            self._update.before()
        self._engine.step()
        skipped = not self._engine.was_step_applied()
        norm = None
        if self.clip_grad is not None:
            norm = self._norm if self._clips_here else self._engine.get_global_grad_norm()
        if norm is not None and not isinstance(norm, Tensor):
            norm = torch.tensor(float(norm))
        self.last_step = StepInfo(None if norm is None else norm.detach(), skipped)
        if overridden(self, "zero_grad"):  # otherwise the engine has already done it
            self.zero_grad()
        return self.last_step

    def zero_grad(self) -> None:
        """See OptimWrapper."""
        self._engine.optimizer.zero_grad()

    def refresh(self) -> None:
        """See OptimWrapper; collective."""
        engine_internals.refresh(self._engine, self._fragments)

    def state_dict(self) -> dict[str, Any]:
        """See OptimWrapper; raises StrategyError, because the engine holds the state."""
        raise in_strategy(self, "state_dict", "DeepSpeed's engine holds the optimizer's state")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See OptimWrapper; raises StrategyError, because the engine holds the state."""
        raise in_strategy(self, "load_state_dict", "DeepSpeed's engine holds the optimizer's state")

    def plain_values(self) -> dict[str, Any]:
        """Return the loss scale under float16, in the form of torch's GradScaler; an empty dict otherwise."""
        if self.precision.compute is not torch.float16:
            return {}
        return {"scaler": engine_internals.scale_state(engine_internals.loss_scaler(self._engine))}

    def load_plain_values(self, state: dict[str, Any]) -> None:
        """Continue with the loss scale of ``plain_values``, if it has one."""
        if self.precision.compute is torch.float16 and state.get("scaler"):
            engine_internals.load_scale_state(engine_internals.loss_scaler(self._engine), state["scaler"])
