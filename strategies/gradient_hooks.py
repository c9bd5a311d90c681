"""Gradient hooks of users, called with the gradient of a whole micro-batch: the mean over the processes that have its samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, Protocol

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..core.base.errors import StrategyError
from ..core.comm.topology import DataShard
from ..core.torch_compat.torch_private import (
    after_backward,
    call_first,
    postpone_gradient_hooks,
    resume_gradient_hooks,
    version_of,
)
from ..optim.gradients import average
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


class AveragedGradients(_AroundBackward):
    """Averages what an optimizer has: before its updates, and after a ``backward`` that the model calls by itself.

    The model's ``train_step`` may look at the gradients, or change them, before it calls ``step``.

    Args:
        optim: has been built.
        data: the processes that average gradients.
        only: some of the optimizer's parameters; None: all that it has.
    """

    def __init__(self, optim: OptimWrapper, data: DataShard, only: list[Tensor] | None = None) -> None:
        super().__init__()
        self._optim, self._data, self._only = optim, data, only
        self._means: list[tuple[Tensor | None, int]] = []
        self.register(optim)
        optim.register_step_pre_hook(lambda _: self._average())

    def _end(self) -> None:
        if self._optim.should_sync() and not self._optim.is_updating:
            self._average()
            self._means = self._gradients()

    @torch.no_grad()
    def _average(self) -> None:
        pairs = zip_longest(self._gradients(), self._means, fillvalue=(None, -1))
        is_new = any(now is not mean or version != then for (now, version), (mean, then) in pairs)
        self._means = []
        average(self._parameters(), self._data, is_new)

    def _parameters(self) -> list[Tensor]:
        return self._only or [parameter for group in self._optim.param_groups for parameter in group["params"]]

    def _gradients(self) -> list[tuple[Tensor | None, int]]:
        """The gradients, and how often each was changed."""
        found = [parameter.grad for parameter in self._parameters()]
        return [(gradient, 0 if gradient is None else version_of(gradient)) for gradient in found]


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
