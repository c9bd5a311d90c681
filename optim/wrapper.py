"""OptimWrapper: one update, with precision, accumulation and clipping; it does not depend on the strategy."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..core.base.config import Config, validate
from ..core.base.errors import CheckpointError, ConfigError, StrategyError
from ..core.base.overriding import overridden
from ..core.base.registry import OPTIM_WRAPPERS
from ..core.comm.collectives import all_reduce
from ..core.device.precision import Precision
from ..core.torch_compat.torch_private import has_values, tells_steps, with_values
from . import gradients
from .adapters import (
    DeepSpeedAdamAdapter,
    FusedAdapter,
    OptimizerAdapter,
    is_deepspeed_adam,
    is_fused,
    updates_matrices,
    wants_whole,
)
from .gradients import ModelGroup
from .param_groups import Roles, check_optimizer, make_for, make_optimizer, roles_of
from .trial import Samples, resumes, updates_apart, why_not_saved, why_not_usable

_SCALER = "loss_scaler"
_MMENGINES = (_SCALER, "apex_amp", "base_param_settings")
"""Keys that MMEngine adds to those of torch; the last one only has what its get_lr() shows."""


def in_strategy(wrapper: OptimWrapper, method: str, reason: str) -> StrategyError:
    """Return the error that says where the state is instead."""
    return StrategyError(
        f"{wrapper.where}.{method}(): {reason}; runner.save_checkpoint and runner.load_checkpoint have all of it, and so "
        "has Strategy.state()"
    )


# UpdateGuard: skip updates whose loss or gradients are not finite.


class UpdateGuard:
    """Sets all gradients of an update to NaN, on every process, if a loss of its window or a gradient is not finite.

    Any single gradient then shows that the update must be skipped. Loss scaling checks gradients in any case; without
    it, ``allows`` copies one number to the host at every update.
    """

    def __init__(self) -> None:
        self.left_out = 0
        """Number of skipped updates."""
        self._losses: list[Tensor] = []
        self._verdict: Tensor | None = None

    def note(self, loss: Tensor) -> None:
        """Record a loss before its backward."""
        self._losses.append(loss.detach())

    def spoil(self, grads: list[Tensor], model_group: ModelGroup | None = None) -> None:
        """Set the gradients to NaN if a gradient or a loss is not finite on any process; a collective.

        Args:
            grads: gradients of one optimizer.
            model_group: needed if a process may have neither losses nor gradients.
        """
        losses, self._losses = self._losses, []
        parts = [loss.float().reshape(()) for loss in losses]
        if grads:
            norm = gradients.total_norm(grads).float()
            parts = [*(part.to(norm.device) for part in parts), norm]
        if not parts and model_group is not None:
            parts = [torch.zeros((), device=model_group.device)]
        if not parts:
            self._verdict = None
            return
        self._verdict = verdict = all_reduce(torch.stack(parts).sum())
        gradients.multiply(grads, torch.where(verdict.isfinite(), 1.0, math.nan))

    def allows(self) -> bool:
        """Return whether all losses and gradients were finite; waits for the device."""
        verdict = self._verdict
        is_good = verdict is None or not has_values(verdict) or bool(verdict.isfinite())
        self.left_out += not is_good
        return is_good


_logger = logging.getLogger("flextrain")


@dataclass(frozen=True)
class StepInfo:
    """The outcome of one update.

    Attributes:
        grad_norm: total gradient norm before clipping, 0-dim on the device; None when it was not computed.
        skipped: whether the update was skipped because the loss or a gradient was not finite.
    """

    grad_norm: Tensor | None = None
    skipped: bool = False


_APPLIED = StepInfo()
_NONE_YET = StepInfo()
_UNTOLD = StepInfo()  # of a step of the user's own, which does not say what it has done


class ClipGrad(Config):
    """``clip_grad=dict(type='norm', max_norm=...)`` or ``dict(type='value', clip_value=...)``."""

    type: Literal["norm", "value"] = "norm"
    max_norm: float | int | None = None
    norm_type: float | int = 2.0
    error_if_nonfinite: bool = False
    clip_value: float | int | None = None

    def check(self, where: str) -> ClipGrad:
        """Return self; raise ConfigError if the keys do not fit the type."""
        keys = ("max_norm", "norm_type", "error_if_nonfinite") if self.type == "norm" else ("clip_value",)
        needed = keys[0]
        value = getattr(self, needed)
        if value is None:
            raise ConfigError(f'{where}.{needed}: missing, type="{self.type}" needs it')
        if value <= 0:
            raise ConfigError(f"{where}.{needed}: {value} is not allowed, give a number above 0")
        if not self.norm_type > 0:
            raise ConfigError(f"{where}.norm_type: {self.norm_type} is not allowed, give a number above 0, or inf")
        for key in sorted(self.model_fields_set - {"type", *keys}):
            if getattr(self, key) is not None:
                raise ConfigError(f'{where}.{key}: has no meaning with type="{self.type}", leave it out')
        return self


@OPTIM_WRAPPERS.register_module()
class OptimWrapper:
    """An optimizer with its accumulation window, gradient clipping and precision.

    Args:
        optimizer: ``dict(type='AdamW', lr=...)``, a callable that takes parameter groups, or a built torch optimizer.
            The first two also work if a strategy replaces the model's parameters.
        accumulative_counts: micro-batches per update, a whole number; the last window of an epoch may be shorter, and its
            losses are divided by its own length.
        clip_grad: ``dict(max_norm=...)`` for the total norm, ``dict(type='value', clip_value=...)`` for each element.
        paramwise_cfg: learning-rate and weight-decay multipliers, see ``DefaultOptimWrapperConstructor``; with a constructor
            of one's own, also that one's keys.
        constructor: a class, or its name, that creates the parameter groups; default: DefaultOptimWrapperConstructor.
    """

    _has_seen_step = _sees_none = False  # see observe_steps
    _observing: Any = None
    guard: UpdateGuard | None = None
    last_step = _NONE_YET
    is_updating = False
    """Whether ``update_params`` calls ``backward``, so that nobody sees the gradients before ``step``."""
    _accumulate: int
    _clip_grad: ClipGrad | None = None
    _left: int | None = None  # micro-batches from the window's first on; None: no end is known
    _is_prepared = False  # the hooks of this update were called
    _driven = False  # a training loop announces every micro-batch
    _calls = 0  # of update_params since the last window of several micro-batches
    _has_told = False
    _adapter: OptimizerAdapter | None = None
    _roles: Roles | None = None
    _autocast: Callable[[], AbstractContextManager[None]] | None = None
    _model_group: ModelGroup | None = None

    def __init__(
        self,
        optimizer: Any,
        accumulative_counts: float = 1,
        clip_grad: dict[str, Any] | None = None,
        paramwise_cfg: dict[str, Any] | None = None,
        constructor: Any = "DefaultOptimWrapperConstructor",
        *,
        where: str = "optim_wrapper",
    ) -> None:
        if accumulative_counts < 1 or accumulative_counts % 1:
            allowed = "a whole number" if accumulative_counts % 1 else "1 or more"
            raise ConfigError(f"{where}.accumulative_counts: {accumulative_counts} is not allowed, give {allowed}")
        self.where = where
        self._accumulate = int(accumulative_counts)  # 64 / 16 is a float
        if clip_grad is not None:
            self.clip_grad = clip_grad
        own = {"type": type(self).__name__, "accumulative_counts": self._accumulate, "clip_grad": clip_grad}
        self._recipe = check_optimizer(optimizer, paramwise_cfg, constructor, where, own)
        self._optimizer: Optimizer | None = optimizer if isinstance(optimizer, Optimizer) else None
        self._step_pre_hooks: list[Callable[[OptimWrapper], None]] = []
        self._backward_pre_hooks: list[Callable[[Tensor], None]] = []
        self._index, self._size = 0, self._accumulate

    def _set_accumulate(self, number: int) -> None:
        if self._driven and number != self._accumulate:
            raise ConfigError(
                f"{self.where}.accumulate: {self._accumulate} cannot become {number} now, a training loop has begun with it; end this run, and "
                "resume it with other accumulative_counts"
            )
        self._accumulate = number

    def _set_clip_grad(self, given: ClipGrad | dict[str, Any] | None) -> None:
        if given is not None and not isinstance(given, ClipGrad):
            given = validate(ClipGrad, given, f"{self.where}.clip_grad").check(f"{self.where}.clip_grad")
        self._clip_grad = given

    accumulate: int = property(attrgetter("_accumulate"), _set_accumulate, doc="Micro-batches of an update.")  # type: ignore[assignment]
    clip_grad: Any = property(
        attrgetter("_clip_grad"),
        lambda self, given: self._set_clip_grad(given),
        doc="A hook may set another, also a dict or None.",
    )
    # MMEngine's names, which a hook may set.
    accumulative_counts = _accumulative_counts = accumulate
    clip_grad_kwargs = clip_grad

    # Called by the strategy, in this order

    @property
    def precision(self) -> Precision:
        """The dtypes wanted for computation and for parameters, and the loss scale."""
        return Precision()

    def attach(self, device: torch.device, autocast: Callable[[], AbstractContextManager[None]]) -> None:
        """Store the training device and the strategy's context for forward."""
        self._autocast = autocast

    def examine(self, model: nn.Module) -> None:
        """Note which parameters an optimizer of matrices updates, while the model is whole and as the user has made it.

        Raises:
            ConfigError: the optimizer's configuration does not fit the model.
        """
        if self._optimizer is None:
            self._roles = roles_of(self._recipe, model)

    def build(self, model: nn.Module) -> None:
        """Create the torch optimizer for the parameters of ``model``, after they were wrapped and sharded.

        Raises:
            StrategyError: the optimizer was built before and holds parameters that are not the model's, or it cannot
                train these parameters.
        """
        if self._optimizer is None:
            self._optimizer = self._make(model)
        else:
            own = {id(parameter) for parameter in model.parameters()}
            if any(id(p) not in own for group in self._optimizer.param_groups for p in group["params"]):
                raise StrategyError(
                    f"{self.where}.optimizer: holds parameters that are not the model's, give dict(type=...) instead of a "
                    "built optimizer so that it is made after the model is placed"
                )
        self.adapter.check(model)
        with with_values():
            self._try_optimizer()

    def spread(self, model_group: ModelGroup) -> None:
        """Combine norms and overflows with the processes that hold the other parameters of the model.

        Raises:
            StrategyError: the optimizer keeps gradients in its own memory and clips them itself.
        """
        if self.adapter.owns_gradients:
            raise StrategyError(
                f"{self.where}.optimizer: {type(self.optimizer).__name__} keeps and clips its gradients itself, and "
                "cannot combine norms of processes with different parameters; choose one of torch's optimizers"
            )
        self._model_group = model_group

    def _make(self, model: nn.Module) -> Optimizer:
        return make_optimizer(self._recipe, model, self._roles)

    def make_another(self, groups: list[dict[str, Any]]) -> Optimizer:
        """Create an optimizer with the same configuration for other parameters."""
        return make_for(self._recipe, groups)

    def _try_optimizer(self) -> None:
        """Run the optimizer on small parameters; log a warning if a checkpoint would miss part of its state.

        Raises:
            StrategyError: its ``step()`` needs a closure, or its state cannot be saved.
        """
        if self.adapter.is_elementwise:
            return
        kind, own = type(self.optimizer).__name__, type(self)
        samples = Samples.like(self.optimizer)
        # An override may call the optimizer's step with a closure.
        if own.update_params is OptimWrapper.update_params and own.step is OptimWrapper.step:
            reason = why_not_saved(self.optimizer) or why_not_usable(self.make_another, samples)
            if reason is not None:
                raise StrategyError(f"{self.where}.optimizer: {kind} {reason}")
        resumed = resumes(self.make_another, samples)
        if self._steps_in_parts:
            self._check_parts(resumed, samples)
        if not resumed:
            _logger.warning(
                '%s.optimizer: %s keeps values outside of its parameters\' "state" and "param_groups", which checkpoints do not '
                "contain; a resumed run will differ from an uninterrupted one",
                self.where,
                kind,
            )

    def _check_parts(self, resumed: bool, samples: Samples) -> None:
        """Raise StrategyError if the optimizer cannot step some of the parameters at a time; ``resumed``: checkpoints have all it keeps."""
        kind = f"{self.where}.optimizer: {type(self.optimizer).__name__}"
        if not resumed:
            raise StrategyError(
                f'{kind} keeps values outside of its parameters\' "state" and "param_groups", which are lost where owners '
                "step sharded parameters; keep them in the state, or choose data parallelism without sharding"
            )
        if not updates_apart(self.make_another, samples):
            raise StrategyError(
                f"{kind} updates a parameter otherwise beside others than alone, by a norm of all gradients, say, and owners step "
                "sharded parameters apart; choose data parallelism without sharding"
            )

    @property
    def _steps_in_parts(self) -> bool:
        """Whether updates will call the optimizer's step several times."""
        return self.adapter.steps_in_parts

    # Facts

    @property
    def optimizer(self) -> Optimizer:
        """The torch optimizer.

        Raises:
            StrategyError: it is not built yet.
        """
        if self._optimizer is None:
            raise StrategyError(f"{self.where}: the optimizer is not built yet, Strategy.setup(model, optim) builds it")
        return self._optimizer

    @property
    def adapter(self) -> OptimizerAdapter:
        """The adapter for this optimizer: everything it needs beyond torch's interface."""
        if self._adapter is None or self._adapter.optimizer is not self._optimizer:
            self._adapter = adapter_for(self.optimizer, self.where)
        return self._adapter

    @property
    def is_built(self) -> bool:
        """Whether the torch optimizer exists."""
        return self._optimizer is not None

    @property
    def chose_fused(self) -> bool:
        """Whether one kernel makes the updates without the configuration saying so, because the device has it."""
        given, defaults = self._recipe.optimizer, getattr(self.optimizer, "defaults", {})
        return isinstance(given, (Mapping, str)) and "fused" not in given and bool(defaults.get("fused"))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The torch optimizer's groups; schedulers write into them."""
        return self.optimizer.param_groups

    @property
    def wrappers(self) -> dict[str, OptimWrapper]:
        """The wrappers that hold a torch optimizer, by name; a single wrapper has the empty name."""
        return {"": self}

    def refresh(self) -> None:
        """Copy masters into the model's parameters, after something else has written to the masters."""

    # One update

    def begin(self, index: int, size: int) -> None:
        """Announce micro-batch ``index`` of a window of ``size``; called by the training loop."""
        self._index, self._size, self._driven = index, size, True
        if index == 0:
            self.last_step, self._has_seen_step = _NONE_YET, self._sees_none

    @property
    def has_stepped(self) -> bool:
        """Whether an update was made or skipped since the window began."""
        return self.last_step is not _NONE_YET

    @property
    def has_updated(self) -> bool:
        """Whether an update was made since the window began: it was neither skipped nor left out by the recipe or the model."""
        is_told = self.last_step is not _NONE_YET and self.last_step is not _UNTOLD
        return not self.last_step.skipped and (is_told or self._has_seen_step)

    def observe_steps(self) -> None:
        """Look at the torch optimizer for ``has_updated``, because others than this class's ``step`` decide on updates."""
        if self._observing is not None:
            self._observing.remove()
        can_tell = tells_steps(self.optimizer)
        self._observing = self.optimizer.register_step_post_hook(self._see_step) if can_tell else None
        self._sees_none = not can_tell  # then every window counts as one with an update

    def _see_step(self, *_: Any) -> None:
        self._has_seen_step = True

    def should_sync(self) -> bool:
        """Return whether gradients are reduced in the current micro-batch: if it is the last of its window."""
        return self._index == self._size - 1

    def should_update(self) -> bool:
        """Return whether ``update_params`` updates after the current micro-batch: if it is the last of its window."""
        return self._index == self._size - 1

    def optim_context(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return the context for forward: autocast if the precision needs it."""
        return nullcontext() if self._autocast is None else self._autocast()

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        """Run backward for a scalar loss that is already divided by the length of the window; ``retain_graph`` is torch's."""
        for hook in self._backward_pre_hooks:
            hook(loss)
        if self.guard is not None:
            self.guard.note(loss)
        loss.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss divided by the length of the window."""
        return loss / self._size if self._size > 1 else loss

    def update_params(self, loss: Tensor) -> None:
        """Run backward for one micro-batch, and the update after the last one of the window.

        Outside a training loop it counts the micro-batches itself. The training loop calls this method if a subclass
        overrides it or a method that it calls; otherwise the loop calls ``backward`` and ``step``.
        """
        self._calls += 1
        self.is_updating = not overridden(self, "backward", "step")
        try:
            self.backward(self.scale_loss(loss))
        finally:
            self.is_updating = False
        if self.should_update():
            self.finish()
        if not self._driven:
            self._count()

    def end_window(self) -> None:
        """Warn if the model's ``train_step`` has called ``update_params`` for some micro-batches of the window, and not for others."""
        calls, self._calls = self._calls, 0
        if calls % self._size == 0 or self._has_told or overridden(self, "should_update"):
            return
        self._has_told = True
        made = "and the update was made" if self.has_stepped else "and no update was made, the gradients wait for one"
        _logger.warning(
            f"{self.where}: train_step called update_params {calls} times in the {self._size} micro-batches of an update, {made}; each loss is "
            "divided by their number, and the last one updates. Call it in all micro-batches of an update or in none: let what decides "
            "about it change when should_update() is true"
        )

    def _count(self) -> None:
        """Go on to the next micro-batch, when no training loop announces it."""
        self._index = (self._index + 1) % self._size
        if self._index == 0 and self._left is not None:
            self._left -= self._size
            self._size = min(self.accumulate, self._left) if self._left > 0 else self.accumulate

    def initialize_count_status(self, model: nn.Module, init_counts: int, max_counts: int) -> None:
        """Let ``update_params`` count micro-batches from ``init_counts`` to ``max_counts``, in a loop of one's own.

        The last window may then be shorter. It changes nothing where the training loop announces every micro-batch.
        """
        self._index = init_counts % self.accumulate
        self._left = max_counts - init_counts + self._index
        self._size = max(1, min(self.accumulate, self._left))

    def finish(self) -> StepInfo:
        """Make the update and drop the gradients, also if a subclass's ``step`` keeps them, as in MMEngine."""
        is_own = overridden(self, "step")
        for hook in self._step_pre_hooks if is_own else ():  # first, so that it has the gradients of all processes
            hook(self)
        self._is_prepared = bool(is_own)
        try:
            info: object = self.step()
        finally:
            self._is_prepared = False
        if is_own:
            self.zero_grad()
            if isinstance(info, StepInfo):
                self.last_step = info
            elif not self.has_stepped:
                self.last_step = _UNTOLD
        return self.last_step

    def step(self) -> StepInfo:
        """Unscale and clip the gradients, update the parameters and drop the gradients: once per window."""
        for hook in () if self._is_prepared else self._step_pre_hooks:
            hook(self)
        self.adapter.begin_update()
        if self.guard is not None:
            self.guard.spoil(gradients.gradients(self.param_groups), self._model_group)
        self._unscale()
        norm = None if self.clip_grad is None else self._clip(self.clip_grad)
        applied = self._apply()
        self.zero_grad()
        self.last_step = _APPLIED if applied and norm is None else StepInfo(norm, not applied)
        return self.last_step

    def register_step_pre_hook(self, hook: Callable[[OptimWrapper], None]) -> Callable[[], None]:
        """Call ``hook(self)`` at the start of every update, before gradients are unscaled and clipped.

        Returns:
            A function that removes the hook.
        """
        self._step_pre_hooks.append(hook)
        return lambda: self._step_pre_hooks.remove(hook)

    def register_backward_pre_hook(self, hook: Callable[[Tensor], None]) -> None:
        """Call ``hook(loss)`` before every backward of this wrapper."""
        self._backward_pre_hooks.append(hook)

    def zero_grad(self) -> None:
        """Drop the gradients of all parameters of this optimizer."""
        self.adapter.zero_grad()

    def _unscale(self) -> None:
        pass

    def _clip(self, clip: ClipGrad) -> Tensor | None:
        if clip.max_norm is not None and self._model_group is not None:
            parameters = [parameter for group in self.param_groups for parameter in group["params"]]
            return self._model_group.clip(parameters, clip.max_norm, clip.norm_type, clip.error_if_nonfinite)
        if clip.max_norm is not None and not clip.error_if_nonfinite:
            norm = self.adapter.clip(clip.max_norm, clip.norm_type)
            if norm is not None:
                return norm
        grads = gradients.gradients(self.param_groups)
        if clip.max_norm is not None:
            return gradients.clip_by_norm(grads, clip.max_norm, clip.norm_type, clip.error_if_nonfinite)
        assert clip.clip_value is not None
        gradients.clip_by_value(grads, clip.clip_value)
        return None

    def _apply(self) -> bool:
        if self.guard is not None and not self.guard.allows():
            return False
        with self.adapter.stepping():
            self.optimizer.step()
        return True

    # State, learning rate and momentum

    def plain_values(self) -> dict[str, Any]:
        """Return what checkpoints store beside ``Strategy.state``, as plain values: the loss scale."""
        return {}

    def load_plain_values(self, state: dict[str, Any]) -> None:
        """Continue from ``plain_values``."""

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state in torch's format, for a loop of one's own; a runner's checkpoints have it anyway.

        Where losses are scaled, the loss scale is in it as ``loss_scaler``.

        Raises:
            StrategyError: this process has a part of the state only, or the optimizer is not built yet.
        """
        self._check_whole("state_dict")
        state: dict[str, Any] = self.optimizer.state_dict()
        scaler = self.plain_values().get("scaler")
        return state if scaler is None else {**state, _SCALER: scaler}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a ``state_dict``, or from that of a torch optimizer or of MMEngine's OptimWrapper.

        Raises:
            CheckpointError: it is neither, or one of other parameters.
            StrategyError: as ``state_dict``.
        """
        self._check_whole("load_state_dict")
        if not {"state", "param_groups"} <= state.keys():
            found = ", ".join(map(str, state)) or "nothing"
            raise CheckpointError(
                f"{self.where}.load_state_dict: has {found}, give what state_dict() returned: state and param_groups"
            )
        try:
            self.optimizer.load_state_dict({key: value for key, value in state.items() if key not in _MMENGINES})
        except ValueError as error:  # other groups, or other numbers of parameters
            raise CheckpointError(f"{self.where}.load_state_dict: {error}") from error
        if scaler := state.get(_SCALER):
            self.load_plain_values({"scaler": scaler})

    def _check_whole(self, method: str) -> None:
        """Raise StrategyError if other processes have other parts of the state."""
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        if self._model_group is not None or any(isinstance(parameter, DTensor) for parameter in parameters):
            raise in_strategy(self, method, "this process holds a part of the optimizer's state")

    def get_lr(self) -> dict[str, list[float]]:
        """Return the learning rate of every group, as ``{"lr": [...]}``."""
        return {"lr": [float(group["lr"]) for group in self.param_groups]}

    def get_momentum(self) -> dict[str, list[float]]:
        """Return the momentum of every group (the first of ``betas`` if it has these), as ``{"momentum": [...]}``."""
        momenta = [g.get("momentum", g["betas"][0] if "betas" in g else 0.0) for g in self.param_groups]
        return {"momentum": [float(momentum) for momentum in momenta]}

    def __repr__(self) -> str:
        kind = type(self._optimizer).__name__ if self._optimizer is not None else "not built"
        return f"{type(self).__name__}({kind}, accumulate={self.accumulate})"


# Choose the adapter of an optimizer.


def adapter_for(optimizer: Optimizer, where: str) -> OptimizerAdapter:
    """Return the adapter of an optimizer; ``where`` is the configuration key of its wrapper."""
    kind = type(optimizer)
    if is_fused(kind):
        return FusedAdapter(optimizer, where)
    if is_deepspeed_adam(kind):
        return DeepSpeedAdamAdapter(optimizer, where)
    if not updates_matrices(kind) and not wants_whole(kind):
        return OptimizerAdapter(optimizer, where)
    from .owner_adapters import MuonAdapter, WholeAdapter  # which most scripts do without

    return MuonAdapter(optimizer, where) if updates_matrices(kind) else WholeAdapter(optimizer, where)
