"""Gradient hooks of users, called with the gradient of a whole micro-batch: the mean over the processes that have its samples."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..core.base.errors import StrategyError
from ..core.comm.collectives import is_main
from ..core.comm.topology import DataShard
from ..core.random.generators import load_torch_states, torch_states
from ..core.torch_compat.torch_private import (
    after_backward,
    call_first,
    postpone_gradient_hooks,
    resume_gradient_hooks,
    tells_steps,
    version_of,
)
from ..optim.gradients import average, average_used, most
from ..optim.trial import Samples, draws
from ..optim.wrapper import OptimWrapper

PATIENCE_S = 60.0
"""How long a process waits at a hook of stage 3 for the others, which are in the same backward."""

Hooked = tuple[nn.Parameter, Sequence[Any]]
"""A parameter that is whole on every process, with the hooks of users that it has."""


class Removable(Protocol):
    """Hooks of a strategy's on the user's parameters, or something else that teardown takes back."""

    def remove(self) -> None: ...


class _AroundBackward:
    """Does something at the end of every backward, after all that others have left to its end."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []

    def remove(self) -> None:
        """Leave the parameters with the hooks of the user alone."""
        for handle in self._handles:
            handle.remove()

    def register(self, optim: OptimWrapper) -> None:
        """Look after every backward of this wrapper."""
        optim.register_backward_pre_hook(self._begin)

    def _begin(self, loss: Tensor) -> None:
        if loss.requires_grad:
            loss.register_hook(lambda _: after_backward(partial(after_backward, self._end)))  # type: ignore[no-untyped-call]

    def _end(self) -> None:
        raise NotImplementedError


class HooksAfterBackward(_AroundBackward):
    """Calls the hooks when backward is through, for all parameters in one order.

    Within backward, processes would wait for each other: their samples may use other parameters, or in another order. A process
    that has not used a parameter counts with zeros; what no process has used has no gradient and no call, as on one device.

    Args:
        hooked: parameters with hooks, by name.
        data: the processes that average gradients.
        at_end: false if someone else calls ``settle`` after every backward.
    """

    def __init__(self, hooked: Mapping[str, Hooked], data: DataShard, *, at_end: bool = True) -> None:
        super().__init__()
        self.parameters = [parameter for parameter, _ in hooked.values()]
        self._data, self._at_end = data, at_end
        self._hooks = [postpone_gradient_hooks(parameter, hooks) for parameter, hooks in hooked.values()]
        self._own: dict[int, Tensor] = {}  # gradients of this process and this backward
        self.is_due = False
        for number, (name, (parameter, _)) in enumerate(hooked.items()):
            is_trained = parameter.requires_grad
            hook = partial(self._take, number, name)
            self._handles.append(parameter.requires_grad_(True).register_hook(hook))  # type: ignore[no-untyped-call]
            parameter.requires_grad_(is_trained)

    def remove(self) -> None:
        super().remove()
        for parameter in self.parameters:
            resume_gradient_hooks(parameter)

    def _begin(self, loss: Tensor) -> None:
        self._own.clear()
        self.is_due = True
        if self._at_end:
            super()._begin(loss)

    def _take(self, number: int, name: str, gradient: Tensor) -> Tensor:
        if not self.is_due or gradient.is_sparse:
            why = "its gradient is sparse" if self.is_due else "its gradient is not computed by the optimizer wrapper"
            raise StrategyError(
                f"model.{name}: has a gradient hook (register_hook, register_post_accumulate_grad_hook), and {why}, so that the "
                "hook would get that of one process; give sparse=False, call optim_wrapper.backward(loss) or update_params(loss), or "
                "remove the hook"
            )
        earlier = self._own.get(number)  # in recomputation that nests backwards
        self._own[number] = gradient.detach().clone() if earlier is None else earlier + gradient.detach()
        return torch.zeros_like(gradient)

    def _end(self) -> None:
        self.settle()

    @torch.no_grad()
    def settle(self) -> None:
        """Average the gradients of this backward, call the hooks, and accumulate; a collective."""
        if not self.is_due:
            return
        self.is_due = False
        accumulated = [parameter.grad for parameter in self.parameters]
        for number, parameter in enumerate(self.parameters):
            parameter.grad = self._own.pop(number, None)
        average([*self.parameters], self._data)
        for parameter, (before, after), earlier in zip(self.parameters, self._hooks, accumulated, strict=True):
            gradient, parameter.grad = parameter.grad, earlier
            if gradient is None:
                continue
            for hook in before():
                changed = hook(gradient)
                gradient = gradient if changed is None else changed
            parameter.grad = gradient if earlier is None else earlier + gradient
            for hook in after():
                hook(parameter)


def _before_steps(optim: OptimWrapper, hook: Callable[..., None]) -> list[RemovableHandle]:
    """Call ``hook`` before steps of the torch optimizer, which a ``train_step`` may call past the wrapper."""
    can_tell = tells_steps(optim.optimizer) and not optim.adapter.steps_in_parts
    return [optim.optimizer.register_step_pre_hook(hook)] if can_tell else []


class StepsInTime:
    """Refuses updates that a ``train_step`` makes before the last micro-batch of a window, when gradients are those of one process.

    Args:
        optim: the optimizer's wrapper.
    """

    def __init__(self, optim: OptimWrapper) -> None:
        self._optim = optim
        optim.register_step_pre_hook(self._check)
        self._handles = _before_steps(optim, self._check)

    def remove(self) -> None:
        """Leave the optimizer alone."""
        for handle in self._handles:
            handle.remove()

    def _check(self, *_: Any) -> None:
        if not self._optim.should_sync():
            raise StrategyError(
                f"{self._optim.where}.accumulative_counts: train_step updates in a micro-batch that is not the last of its window, when "
                "processes have not averaged their gradients yet; let it call step() when should_update() is true, or leave accumulative_counts out"
            )


class _DrawsAlike:
    """Lets an optimizer draw the same random numbers on all processes, those of the first one."""

    def __init__(self, optim: OptimWrapper, data: DataShard, device: torch.device) -> None:
        self._data, self._device = data, device
        self._own: dict[str, Tensor] = {}
        self._handles = [
            optim.optimizer.register_step_pre_hook(self._begin),
            optim.optimizer.register_step_post_hook(self._end),
        ]

    def remove(self) -> None:
        """Leave the optimizer alone."""
        for handle in self._handles:
            handle.remove()

    def _begin(self, *_: Any) -> None:
        self._own = torch_states(self._device)
        shared = {name: state.clone() for name, state in self._own.items()}
        self._data.share(list(shared.values()))
        load_torch_states(shared, self._device)

    def _end(self, *_: Any) -> None:
        if self._data.index:
            load_torch_states(self._own, self._device)


def draw_alike(strategy: Any, optim: OptimWrapper, data: DataShard) -> None:
    """Let an optimizer that draws random numbers draw the same on all processes, whose replicas would differ otherwise.

    Args:
        strategy: whose hooks these are.
        optim: the optimizer's wrapper.
        data: the processes that have the same parameters, or shards of them.
    """
    if not optim.adapter.is_elementwise and draws(optim.make_another, Samples.like(optim.optimizer)):
        strategy._gradient_hooks.append(_DrawsAlike(optim, data, strategy.device))


class OwnMeans(_AroundBackward):
    """Averages the gradients of an optimizer that no engine averages, because the model calls itself in its ``train_step``.

    It does so at an update, and after each backward that ``train_step`` asks for apart from one: it may clip the gradients, or move
    the weights by them and ask for others, as SAM does. A process at its update joins those that have further backwards. Gradients
    that come past the wrapper become means at the update only, which is told once.

    Args:
        optim: the optimizer's wrapper.
        parameters: returns those whose gradients are averaged.
        data: the processes that average them.
    """

    def __init__(self, optim: OptimWrapper, parameters: Callable[[], list[Tensor]], data: DataShard) -> None:
        super().__init__()
        self._optim, self._parameters, self._data = optim, parameters, data
        self._means: list[tuple[Callable[[], Tensor | None], int]] = []
        self._is_ready = False  # for the optimizer's step
        self._has_begun = self._is_told = False
        self.register(optim)
        optim.register_step_pre_hook(self._prepare)
        self._handles += _before_steps(optim, self._before_step)

    def _begin(self, loss: Tensor) -> None:
        self._has_begun, self._is_ready = True, False
        if self._optim.should_sync() and not self._optim.is_updating:
            super()._begin(loss)

    def _end(self) -> None:
        self._average(is_at_update=False)

    def _prepare(self, optim: OptimWrapper) -> None:
        self._average(is_at_update=True)
        self._is_ready = True

    def _before_step(self, *_: Any) -> None:
        if not self._is_ready:
            self._average(is_at_update=True)
        self._is_ready = False

    def _average(self, *, is_at_update: bool) -> None:
        is_over, parameters = False, self._parameters()
        while not is_over:
            own = [p.grad for p in parameters]
            flags = [not is_at_update, self._have_changed(own), *(grad is not None for grad in own)]
            others_go_on, has_changed, *used = most(flags, self._data)
            if has_changed:
                if is_at_update and not self._has_begun:
                    self._tell()
                average_used(parameters, used, self._data)
                found = (p.grad for p in parameters)
                self._means = [(weakref.ref(grad), version_of(grad)) for grad in found if grad is not None]
            is_over = not (is_at_update and others_go_on)
        self._has_begun = self._has_begun and not is_at_update

    def _tell(self) -> None:
        if not self._is_told and is_main():
            logging.getLogger("flextrain").warning(
                "model: train_step computes gradients past optim_wrapper, as by loss.backward() or torch.autograd.grad; they become means over "
                "the processes at the step only, and what train_step did with them before, such as clipping, had those of one process: "
                "call optim_wrapper.backward(loss) or update_params(loss)"
            )
        self._is_told = True

    def _have_changed(self, own: Sequence[Tensor | None]) -> bool:
        found = [(grad, version_of(grad)) for grad in own if grad is not None]
        return len(found) != len(self._means) or any(
            grad is not mean() or version != before
            for (grad, version), (mean, before) in zip(found, self._means, strict=True)
        )


class HooksInOrder(_AroundBackward):
    """Averages gradients within backward, before hooks get them, where parameters are whole only then; refuses other orders.

    Args:
        hooked, data: see ``HooksAfterBackward``.
        rank: of this process, for messages.
        group: of the processes, which waits for a minute only.
    """

    def __init__(self, hooked: Mapping[str, Hooked], data: DataShard, rank: int, group: Any) -> None:
        super().__init__()
        self._names, self._data, self._rank, self._group = list(hooked), data, rank, group
        self._backwards = 0
        for number, (parameter, _) in enumerate(hooked.values()):
            if parameter.requires_grad:
                self._handles.append(call_first(parameter, partial(self._come, number)))

    def _begin(self, loss: Tensor) -> None:
        self._backwards += 1
        super()._begin(loss)

    def _come(self, number: int, gradient: Tensor) -> Tensor:
        self._meet(number)
        return self._data.mean(gradient.clone())

    def _end(self) -> None:
        self._meet(len(self._names))

    def _meet(self, number: int) -> None:
        own = torch.tensor([self._backwards, number], device="cpu")
        found = [torch.empty_like(own) for _ in range(self._data.count)]
        cause = None
        try:
            torch_dist.all_gather(found, own, self._group)
        except RuntimeError as error:
            cause = error
        if cause is not None or any(not torch.equal(one, own) for one in found):
            at = f"model.{self._names[number]}" if number < len(self._names) else "the end"
            others = [int(one[1]) for one in found if cause is None and one[1] != number]
            name = self._names[min([*others, number if number < len(self._names) else 0])]
            raise StrategyError(
                f"model.{name}: has a gradient hook, which needs the gradient from every process, and rank {self._rank} is at {at} in "
                f"backward {self._backwards}, where other processes are elsewhere; use the parameter on every process in one order, "
                "or choose stage 1 or 2"
            ) from cause
