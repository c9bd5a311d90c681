"""DeepSpeedOptimWrapper: an OptimWrapper whose backward and update are done by DeepSpeed's engine."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ...core.base.errors import StrategyError
from ...core.base.overriding import overridden
from ...core.base.registry import OPTIM_WRAPPERS
from ...core.comm import collectives as dist
from ...core.comm.topology import DataShard
from ...core.device.precision import Precision
from ...core.torch_compat.torch_private import has_step_hooks
from ...optim import gradients
from ...optim.adapters import wants_whole
from ...optim.param_groups import make_for, make_groups
from ...optim.wrapper import ClipGrad, OptimWrapper, StepInfo, in_strategy
from ..gradient_hooks import HooksAfterBackward
from . import engine_internals, swapping
from .engine_internals import Fragment
from .outside_writes import OutsideWrites

_logger = logging.getLogger("flextrain")

# What DeepSpeed leaves undone before an update, from the inside of its optimizers; written for and tested with
# 0.19.8.
#
# A parameter that an update does not use keeps, where a buffer for its gradient outlives the update, the gradient of
# an earlier one: at stage 3, and at stages 1 and 2 with the optimizer's state in host memory. If only a later micro-
# batch of an update uses it, its gradient is added to the earlier one. Elsewhere DeepSpeed gives such parameters
# zeros, and so do these.


class BeforeUpdate(Protocol):
    """What an update of DeepSpeed's engine needs done before."""

    def before(self) -> None:
        """Prepare the update; called between the last backward and the engine's ``step``."""


def before_update(engine: Any) -> BeforeUpdate | None:
    """Return what an engine that trains needs before its updates; None if nothing. To be called once for an engine."""
    if hasattr(engine.optimizer, "fp32_partitioned_groups_flat"):
        swapping.keep_gradients_in_memory(engine)
        return _ShardedUpdate(engine.optimizer)
    if hasattr(engine.optimizer, "single_partition_of_fp32_groups"):
        return _SameOrder(engine.optimizer)
    return None


class _Used:
    """Which of some parameters had a gradient since it was asked last, in this process and in the others.

    Args:
        own: the parameters, by name.
        data: the processes that train, and the ``device`` on which they agree.

    Attributes:
        handles: of the hooks that note it.
    """

    def __init__(self, own: Sequence[tuple[str, Tensor]], data: DataShard, device: torch.device) -> None:
        self._names, self._used = [name for name, _ in own], set[int]()
        self._data, self._device = data, device
        self.handles: list[RemovableHandle] = [
            parameter.register_hook(partial(self._note, number))  # type: ignore[no-untyped-call]
            for number, (_, parameter) in enumerate(own)
        ]

    def _note(self, number: int, gradient: Tensor) -> None:
        self._used.add(number)

    def _agree(self) -> tuple[list[int], Tensor]:
        """Return what this process has not used, and on the device what some have used, and what some have not; a collective."""
        idle = [number for number in range(len(self._names)) if number not in self._used]
        self._used.clear()
        used = torch.ones(len(self._names), dtype=torch.uint8, device=self._device)
        if idle:
            used[idle] = 0
        dist.all_reduce(ends := torch.stack([used, 1 - used]), "max", self._data.group)
        return idle, ends


class UsedByNobody(_Used):
    """Lets an update leave alone the parameters that no process has used, as on one device; refuses those of which it cannot.

    Where the engine flattens parameters, their weights and state are put back as soon as the optimizer has stepped. They share a
    count of updates, so that one which an optimizer counts for may not be used again.

    Args:
        named: the model's parameters by name.
        wrapper: the wrapper whose updates are checked, with a built optimizer.
        data: the processes that train.
        device: on which they agree.

    Attributes:
        unused: the names of those that no process has used in this update.
        lags: by how many updates the state of a parameter is behind the count that it shares; those that are not have none.
    """

    def __init__(
        self, named: Iterable[tuple[str, Tensor]], wrapper: OptimWrapper, data: DataShard, device: torch.device
    ) -> None:
        moved = {
            id(p) for group in wrapper.param_groups if _moves_without_gradient(wrapper, group) for p in group["params"]
        }
        own = [(name, parameter) for name, parameter in named if parameter.requires_grad and id(parameter) in moved]
        super().__init__(own, data, device)
        self._updates = 0
        self.lags: dict[str, int] = {}
        self._fragments: dict[str, Fragment] = {}
        self.unused: list[str] = []
        self._before: list[tuple[Fragment, Tensor, dict[str, Tensor]]] = []
        self._adapter = wrapper.adapter
        self._in_files = False
        if own:
            wrapper.register_step_pre_hook(self._check)

    def bind(self, optimizer: Optimizer, fragments: Iterable[Fragment], *, in_files: bool) -> None:
        """Watch the steps of the engine's optimizer.

        Args:
            in_files: its state is in files.
        """
        self._fragments, self._in_files = {fragment.name: fragment for fragment in fragments}, in_files
        optimizer.register_step_pre_hook(self._keep)
        optimizer.register_step_post_hook(self._put_back)

    def _check(self, wrapper: OptimWrapper) -> None:
        self._updates += 1
        idle, ends = self._agree()
        # Read only where something was not used: where all was, no process waits for the device.
        self.unused = [self._names[number] for number in (ends[0] == 0).nonzero().flatten().tolist()] if idle else []
        nobody = set(self.unused)
        if again := [name for name in self._names if name in self.lags and name not in nobody and self._counts(name)]:
            raise StrategyError(
                f"model.{again[0]}: is used in update {self._updates} since the start, after {self.lags[again[0]]} updates in which no "
                f"process used it, and DeepSpeed counts the updates of all parameters together for {self._kind(again[0])}; choose SGD, "
                'strategy="fsdp", or give strategy.unused_parameters="zeros"'
            )
        if stuck := [n for n in self.unused if self._fragments[n].offset is not None and not self._is_known(n)]:
            raise StrategyError(
                f"model.{stuck[0]}: no process has used it in update {self._updates} since the start"
                f"{f', nor {len(stuck) - 1} others' if stuck[1:] else ''}, and DeepSpeed would move it all the same, by momentum or "
                f'weight decay of {self._kind(stuck[0])}; freeze it, choose AdamW in memory, strategy="fsdp", or give '
                'strategy.unused_parameters="zeros"'
            )

    def _counts(self, name: str) -> bool:
        group = self._adapter.optimizer.param_groups[self._fragments[name].group]
        return self._kind(name) not in _WITHOUT_COUNT or bool(group.get("dampening"))

    def _kind(self, name: str) -> str:
        """The optimizer that updates a parameter."""
        group = self._adapter.optimizer.param_groups[self._fragments[name].group]
        return type(self._adapter.optimizer_of(group)).__name__

    def _is_known(self, name: str) -> bool:
        return self._kind(name) in _STATE_FROM_ZERO and not self._in_files

    def _keep(self, optimizer: Optimizer, *_: Any) -> None:
        flats = {id(flat) for group in optimizer.param_groups for flat in group["params"]}
        for fragment in (self._fragments[name] for name in self.unused):
            if fragment.offset is None:
                fragment.flat.grad = None
            elif id(fragment.flat) in flats:
                state = {key: _cut(fragment, value).clone() for key, value in _each(optimizer, fragment)}
                self._before.append((fragment, _cut(fragment, fragment.flat).clone(), state))

    def _put_back(self, optimizer: Optimizer, *_: Any) -> None:
        for fragment, weights, state in self._before:
            _cut(fragment, fragment.flat).copy_(weights)
            for key, value in _each(optimizer, fragment):
                own = _cut(fragment, value)
                own.copy_(state[key]) if key in state else own.zero_()
            self.lags[fragment.name] = self.lags.get(fragment.name, 0) + 1
        self._before.clear()


_WITHOUT_COUNT = frozenset({"SGD", "RMSprop", "Adadelta", "Lion", "FusedLion", "DeepSpeedCPULion"})
_STATE_FROM_ZERO = _WITHOUT_COUNT | {"Adam", "AdamW", "RAdam", "Adamax", "FusedAdam", "DeepSpeedCPUAdam"}
"""Optimizers, those of torch and of DeepSpeed, whose state begins with zeros; and those of them that do not count updates."""


def _cut(fragment: Fragment, tensor: Tensor) -> Tensor:
    assert fragment.offset is not None
    return tensor.detach().narrow(0, fragment.offset, fragment.numel)


def _each(optimizer: Optimizer, fragment: Fragment) -> list[tuple[str, Tensor]]:
    """Return the state that an optimizer keeps element by element."""
    kept = optimizer.state.get(fragment.flat, {})
    return [(k, v) for k, v in kept.items() if isinstance(v, Tensor) and v.ndim and v.shape == fragment.flat.shape]


class UsedAlike(_Used):
    """Refuses a backward of stage 3 in which some processes have a gradient of a parameter and others have none.

    All have called the same modules, but one module may use only some of its own parameters: the processes would add up gradients of
    different ones, or wait for each other.

    Args:
        optimizer: DeepSpeed's, of stage 3.
        model: the model, whose leaf modules give zeros for what they have not used.
        data: the processes that train, and the ``device`` on which they agree.
    """

    def __init__(self, optimizer: Any, model: nn.Module, data: DataShard, device: torch.device) -> None:
        leaves = (part for part in model.modules() if getattr(part, "_z3_leaf", False))
        left_out = {id(parameter) for part in leaves for parameter in part.parameters()}
        own = [(name, p) for name, p in model.named_parameters() if p.requires_grad and id(p) not in left_out]
        super().__init__(own, data, device)
        self._finish = optimizer.overlapping_partition_gradients_reduce_epilogue
        optimizer.overlapping_partition_gradients_reduce_epilogue = self._check

    def _check(self) -> None:
        idle, ends = self._agree()
        if idle or self._device.type == "cpu":  # else the other process says it, and this one waits for no device
            apart = (ends[0] + ends[1] > 1).nonzero().flatten().tolist()
            if apart:
                has = "has not used it" if apart[0] in idle else "has used it"
                raise StrategyError(
                    f"model.{self._names[apart[0]]}: rank {self._data.index} {has} in a micro-batch where other processes differ, and stage "
                    "3 adds up the gradients of all; use it on every process, name the module in "
                    "strategy.zero_optimization.leaf_module, or choose stage 1 or 2"
                )
        self._finish()


def _moves_without_gradient(wrapper: OptimWrapper, group: Mapping[str, Any]) -> bool:
    return not isinstance(wrapper.optimizer, torch.optim.SGD) or bool(group["momentum"] or group["weight_decay"])


class _ShardedUpdate:
    """Of stage 3, whose shards of gradients are kept from one update to the next.

    Args:
        optimizer: DeepSpeed's optimizer.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._gradients: dict[int, Tensor] = getattr(
            optimizer, "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition", {}
        )
        parameters = [parameter for group in optimizer.fp16_groups for parameter in group]
        self._swapped = [] if swapping.param_swapper(parameters) is None else parameters
        self._add = optimizer.partition_grads
        optimizer.partition_grads = self._add_to_this_update

    def before(self) -> None:
        """Give parameters that were not used zero gradients, and drop shards that were read and not used."""
        # Otherwise they would get those of an earlier update, or what a buffer held before: another sub-group's state.
        used = self._optimizer._offload_boundary_param_ids
        for number in self._gradients.keys() - used:
            self._gradients[number].zero_()
            used.add(number)
        swapping.drop_buffers(self._swapped)

    def _add_to_this_update(self, parameters: Sequence[Any], gradients: Sequence[Tensor]) -> Any:
        if self._optimizer.micro_step_id > 0:  # the first micro-batch overwrites
            for number in {parameter.ds_id for parameter in parameters} - self._optimizer._offload_boundary_param_ids:
                self._gradients[number].zero_()
        return self._add(parameters, gradients)


class _SameOrder:
    """Of stages 1 and 2, whose messages are filled with gradients in the order in which a process has computed them.

    Processes that use different parameters would average gradients of different ones. Here each parameter has its position in
    one order, that of rank 0's first backward, and a process that has no gradient of it sends zeros.

    Args:
        optimizer: DeepSpeed's optimizer.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        found = [(parameter, group) for group, own in enumerate(optimizer.bit16_groups) for parameter in own]
        self._parameters: list[tuple[Any, int]] = [(p, group) for p, group in found[::-1] if p.requires_grad]
        self._number = {id(parameter): number for number, (parameter, _) in enumerate(self._parameters)}
        self._order = list(range(len(self._parameters)))
        self._came: list[int] | None = []  # in the first backward
        self._waiting: set[int] = set()
        self._at = 0  # position in the order of the first that was not sent
        self._hooks: HooksAfterBackward | None = None
        self._last: list[int] = []
        if optimizer.partition_gradients:
            self._send, self._finish = (
                optimizer.process_gradients,
                optimizer.overlapping_partition_gradients_reduce_epilogue,
            )
            optimizer.process_gradients = self._come
            optimizer.overlapping_partition_gradients_reduce_epilogue = self._send_rest
        else:
            self._reduce = optimizer.reduce_gradients
            optimizer.reduce_gradients = self._reduce_all

    def before(self) -> None:
        """Nothing, because every parameter has a gradient."""

    def send_last(self, hooks: HooksAfterBackward) -> None:
        """Send parameters with gradient hooks at the end of each backward, when these were called; at stage 2."""
        own = {id(parameter) for parameter in hooks.parameters}
        self._last = [n for n in self._order if id(self._parameters[n][0]) in own]
        self._order = [n for n in self._order if n not in self._last]
        self._hooks = hooks

    def _come(self, parameter: Any, group: int) -> None:
        number = self._number[id(parameter)]
        if number in self._last:
            return
        if self._came is not None:
            self._came.append(number)
        self._waiting.add(number)
        self._send_waiting()

    def _send_waiting(self) -> None:
        while self._at < len(self._order) and self._order[self._at] in self._waiting:
            self._waiting.remove(self._order[self._at])
            self._send(*self._parameters[self._order[self._at]])
            self._at += 1

    def _send_rest(self) -> None:
        is_due = self._hooks is not None and self._hooks.is_due
        if self._at or self._waiting or is_due:  # also called at the end of a window, where nothing is left
            for number in self._order[self._at :]:
                if number not in self._waiting:
                    self._give_zeros(self._parameters[number][0])
                    self._waiting.add(number)
            self._send_waiting()
            self._waiting.clear()
            self._at = 0
        if self._hooks is not None and is_due:
            self._hooks.settle()
            for number in self._last:
                if self._parameters[number][0].grad is None:
                    self._give_zeros(self._parameters[number][0])
                self._send(*self._parameters[number])
        self._finish()
        if self._came:
            came = dist.broadcast_object(self._came)
            self._order, self._came = list(dict.fromkeys([*came, *self._order])), None

    def _reduce_all(self, *args: Any, **kwargs: Any) -> Any:
        optimizer = self._optimizer
        # Until then gradients stay in the parameters.
        unused = [
            parameter for parameter, _ in self._parameters if optimizer.get_gradient_for_reduction(parameter) is None
        ]
        for parameter in unused:
            self._give_zeros(parameter)
        if unused and optimizer.use_grad_accum_attribute:
            optimizer.fill_grad_accum_attribute()  # of all parameters
        return self._reduce(*args, **kwargs)

    def _give_zeros(self, parameter: Any) -> None:
        parameter.grad = torch.zeros_like(parameter)


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
    _has_warned = False
    _norm: Tensor | None = None
    _update: BeforeUpdate | None = None
    _writes: OutsideWrites | None = None
    _has_ranges = False
    """Whether the engine gives the optimizer ranges of flattened parameters, as stages 1 to 3 do."""

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

    @property
    def _steps_in_parts(self) -> bool:
        return self._has_ranges and wants_whole(type(self.optimizer))

    def _make(self, model: nn.Module) -> Optimizer:
        with engine_internals.whole_shapes(model):
            groups = make_groups(self._recipe, model, self._roles)
            if self._roles is not None:  # an optimizer of matrices looks at shapes, and keeps nothing of them yet
                return make_for(self._recipe, groups)
        return make_for(self._recipe, groups)

    def bind(
        self, engine: Any, fragments: Sequence[Fragment], writes: OutsideWrites | None, *, clips_here: bool
    ) -> None:
        """Use ``engine`` for backward and update from now on.

        Args:
            writes: what is asked before each update; None: nothing would be lost.
            clips_here: this wrapper clips the gradients, not the engine.
        """
        self._engine, self._fragments, self._writes = engine, fragments, writes
        self._optimizer = engine_internals.inner_optimizer(engine)
        self._clips_here = clips_here
        engine_internals.refuse_other_backwards(engine)
        self._update = before_update(engine)
        if clips_here and self.clip_grad is not None:
            # The engine reduces gradients in step(), so they cannot be clipped before it calls the optimizer.
            self._optimizer.register_step_pre_hook(self._clip_before_update)

    def send_last(self, hooks: HooksAfterBackward) -> None:
        """At stage 2: let the engine send parameters with gradient hooks when these were called."""
        cast(Any, self._update).send_last(hooks)

    def _set_clip_grad(self, given: ClipGrad | dict[str, Any] | None) -> None:
        if self._engine is not None:
            raise StrategyError(
                f"{self.where}.clip_grad: DeepSpeed's engine has begun with it, and keeps it; end this run, and resume it with another"
            )
        super()._set_clip_grad(given)

    def clip_by(self, max_norm: float) -> None:
        """Clip gradients by their total norm."""
        self.clip_grad = ClipGrad(max_norm=max_norm)

    def _clip_before_update(self, *_: Any) -> None:
        assert self.clip_grad is not None
        assert self.clip_grad.max_norm is not None
        grads = gradients.gradients(self.param_groups)
        self._norm = gradients.clip_by_norm(grads, float(self.clip_grad.max_norm))

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        """See OptimWrapper; the engine scales the loss and skips updates that are not finite."""
        for hook in self._backward_pre_hooks:
            hook(loss)
        if self.guard is not None:
            loss = loss * torch.where(loss.detach().isfinite(), 1.0, math.nan)
        self._engine.backward(loss, retain_graph=retain_graph)

    def step(self) -> StepInfo:
        """See OptimWrapper; also reduces gradients that backward has not reduced."""
        for hook in self._step_pre_hooks:
            hook(self)
        if self._has_ranges and not self._has_warned and has_step_hooks(cast(Optimizer, self._optimizer)):
            self._has_warned = True
            _logger.warning(
                "optim_wrapper.optimizer: has a step hook (register_step_pre_hook, register_step_post_hook), to which ZeRO gives a process's "
                "part of all parameters of a group in one tensor: norms in it are of that part; choose zero_optimization.stage=0 or FSDPStrategy"
            )
        self._norm = None
        if self._update is not None:
            self._update.before()
        if self._writes is not None:
            self._writes.check_update()
        self._engine.step()
        self.follow_writes()
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
        self.follow_writes()

    def check_writes(self) -> None:
        """Raise StrategyError if somebody has written to parameters, where the engine does not take the values."""
        if self._writes is not None:
            self._writes.check()

    def follow_writes(self) -> None:
        """Take the model's parameters as they are now: they have the engine's values."""
        if self._writes is not None:
            self._writes.note()

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
