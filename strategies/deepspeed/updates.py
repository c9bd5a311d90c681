"""What DeepSpeed leaves undone before an update, from the inside of its optimizers; written for and tested with 0.19.8.

A parameter that an update does not use keeps, where a buffer for its gradient outlives the update, the gradient of an
earlier one: at stage 3, and at stages 1 and 2 with the optimizer's state in host memory. If only a later micro-batch of an
update uses it, its gradient is added to the earlier one. Elsewhere DeepSpeed gives such parameters zeros, and so do these.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ...core.comm import collectives as dist
from ...core.comm.topology import DataShard
from ...core.errors import StrategyError
from ...optim.wrapper import OptimWrapper
from ..gradient_hooks import HooksAfterBackward
from . import swapping
from .engine_internals import Fragment


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
        self._nobody: list[str] = []
        self._before: list[tuple[Fragment, Tensor, dict[str, Tensor]]] = []
        self._optimizer: Optimizer | None = None
        if own:
            wrapper.register_step_pre_hook(self._check)

    def bind(self, optimizer: Optimizer, fragments: Iterable[Fragment], *, in_files: bool) -> None:
        """Watch the steps of the engine's optimizer.

        Args:
            in_files: its state is in files.
        """
        self._optimizer, self._fragments = optimizer, {fragment.name: fragment for fragment in fragments}
        self._is_known = type(optimizer).__name__ in _STATE_FROM_ZERO and not in_files
        optimizer.register_step_pre_hook(self._keep)
        optimizer.register_step_post_hook(self._put_back)

    def _check(self, wrapper: OptimWrapper) -> None:
        self._updates += 1
        idle, ends = self._agree()
        # Read only where something was not used: where all was, no process waits for the device.
        self._nobody = [self._names[number] for number in (ends[0] == 0).nonzero().flatten().tolist()] if idle else []
        kind, nobody = type(wrapper.optimizer).__name__, set(self._nobody)
        if again := [name for name in self._names if name in self.lags and name not in nobody and self._counts(name)]:
            raise StrategyError(
                f"model.{again[0]}: is used in update {self._updates} since the start, after {self.lags[again[0]]} updates in which no "
                f"process used it, and DeepSpeed counts the updates of all parameters together for {kind}; choose SGD, "
                'strategy="fsdp", or give strategy.unused_parameters="zeros"'
            )
        if stuck := [name for name in self._nobody if self._fragments[name].offset is not None and not self._is_known]:
            raise StrategyError(
                f"model.{stuck[0]}: no process has used it in update {self._updates} since the start"
                f"{f', nor {len(stuck) - 1} others' if stuck[1:] else ''}, and DeepSpeed would move it all the same, by momentum or "
                f'weight decay of {kind}; freeze it, choose AdamW in memory, strategy="fsdp", or give '
                'strategy.unused_parameters="zeros"'
            )

    def _counts(self, name: str) -> bool:
        assert self._optimizer is not None
        group = self._optimizer.param_groups[self._fragments[name].group]
        return type(self._optimizer).__name__ not in _WITHOUT_COUNT or bool(group.get("dampening"))

    def _keep(self, optimizer: Optimizer, *_: Any) -> None:
        flats = {id(flat) for group in optimizer.param_groups for flat in group["params"]}
        for fragment in (self._fragments[name] for name in self._nobody):
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
        for parameter, _ in self._parameters:  # until then gradients stay in the parameters
            if self._optimizer.get_gradient_for_reduction(parameter) is None:
                self._give_zeros(parameter)
                if self._optimizer.use_grad_accum_attribute:
                    self._optimizer.fill_grad_accum_attribute()
        return self._reduce(*args, **kwargs)

    def _give_zeros(self, parameter: Any) -> None:
        parameter.grad = torch.zeros_like(parameter)
