"""One order of FSDP's units on all processes, also where the samples of some do not go through all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn

from ...core.comm import collectives as dist
from ...core.comm.topology import DataShard
from ...core.dtensor_private import after_backward, complete_backward, in_backward, pass_by
from ...core.errors import StrategyError
from ...core.trees import tree_map_only

PATIENCE_S = 60.0
"""How long a process that leaves the known order waits for the others: they have all begun the same forward."""


@dataclass
class _Call:
    """A call of a unit in a forward, or the passing by of one that is not called."""

    unit: int
    is_passed_by: bool
    has_backward: bool = False


@dataclass
class _Forward:
    """A forward of the whole model."""

    key: bool
    learns: bool
    calls: list[_Call] = field(default_factory=list)
    is_finishing: bool = False
    done: int | None = None  # calls from here on are through backward


class UnitOrder:
    """Makes every process gather, free and reduce the units in one order.

    A unit is gathered by all processes together. One whose samples do not need the unit gathers it too, at the same position
    of the order, and reduces zeros for it. In the first forward the processes tell each other at every unit which one they
    come to, and learn the order. From then on each knows which units it has passed by.

    Args:
        root: the module that is called, after ``fully_shard``.
        units: its units by name. Units inside of other units are not looked at.
        data: the processes that gather together.
        groups: two gloo groups of theirs that nothing else uses, of which the second waits for ``PATIENCE_S`` only.
        wrapped: applied to hooks, which a compiler must not see.
    """

    def __init__(
        self,
        root: nn.Module,
        units: dict[str, nn.Module],
        data: DataShard,
        groups: Sequence[Any],
        wrapped: Callable[[Any], Any] = lambda hook: hook,
    ) -> None:
        own = {id(unit) for unit in units.values()}
        inner = {id(part) for unit in units.values() for part in unit.modules() if part is not unit}
        found = [(name, unit) for name, unit in units.items() if id(unit) not in inner]
        self._names, self._units = [name for name, _ in found], [unit for _, unit in found]
        outer = {id(unit) for unit in units.values() if any(id(part) in own for part in unit.modules() if part is not unit)}
        self._nested = {number for number, unit in enumerate(self._units) if id(unit) in outer}
        self._data, self._groups = data, groups
        self._orders: dict[bool, list[_Call]] = {}
        self._forward: _Forward | None = None
        self._count = 0
        root.register_forward_pre_hook(wrapped(self._begin), prepend=True)
        root.register_forward_hook(wrapped(self._end), prepend=True)
        for number, unit in enumerate(self._units):
            unit.register_forward_pre_hook(wrapped(partial(self._come_to, number)), prepend=True)
            unit.register_forward_hook(wrapped(partial(self._leave, number)), prepend=True)

    # Forward

    def _begin(self, root: nn.Module, args: Any) -> None:
        if in_backward():
            return
        self._count += 1
        key = torch.is_grad_enabled()
        self._forward = _Forward(key, key not in self._orders)

    def _come_to(self, number: int, unit: nn.Module, args: Any) -> None:
        if self._forward is None or in_backward():
            return
        forward = self._forward
        if not forward.learns:
            order = self._orders[forward.key]
            ahead = range(len(forward.calls), len(order))
            if (at := next((i for i in ahead if order[i].unit == number), None)) is not None:
                for call in order[len(forward.calls) : at]:
                    self._pass_by(forward, call.unit, call.has_backward)
            else:
                forward.learns = True
        if forward.learns:
            while (next_one := self._next(number, forward)) != number:
                self._pass_by(forward, next_one)
        forward.calls.append(_Call(number, is_passed_by=False))

    def _leave(self, number: int, unit: nn.Module, args: Any, output: Any) -> None:
        forward = self._forward
        if forward is None or in_backward():
            return
        at = len(forward.calls) - 1
        self._watch(output, partial(self._arrive, forward, at), forward.calls[at])

    def _end(self, root: nn.Module, args: Any, output: Any) -> None:
        forward, self._forward = self._forward, None
        if forward is None or in_backward():
            return
        if forward.learns:
            while (next_one := self._next(len(self._units), forward)) != len(self._units):
                self._pass_by(forward, next_one)
            self._learn(forward)
        else:
            for call in self._orders[forward.key][len(forward.calls) :]:
                self._pass_by(forward, call.unit, call.has_backward)
        for call, known in zip(forward.calls, self._orders[forward.key], strict=False):
            call.has_backward |= known.has_backward
        self._watch(output, partial(self._arrive, forward, len(forward.calls)))

    def _pass_by(self, forward: _Forward, number: int, has_backward: bool = False) -> None:
        if number in self._nested:
            raise StrategyError(
                f"model.{self._names[number]}: rank {dist.get_rank()} does not call this FSDP unit in forward {self._count}, where "
                "other processes do, and it has units inside; choose units that do not contain each other, or leave out strategy.wrap"
            )
        forward.calls.append(_Call(number, is_passed_by=True, has_backward=has_backward))
        pass_by(self._units[number])

    def _next(self, own: int, forward: _Forward) -> int:
        """Return the first unit that any process comes to now."""
        message = [self._count, len(forward.calls), own]
        found = self._exchange(message, own, forward)
        if any(other[:2] != message[:2] for other in found):
            raise self._disagreement(own)
        return min(other[2] for other in found)

    def _exchange(self, message: Sequence[int], own: int, forward: _Forward) -> list[list[int]]:
        box = torch.tensor(message, device="cpu")
        boxes = [torch.empty_like(box) for _ in range(self._data.count)]
        is_known = forward.key in self._orders
        try:
            torch_dist.all_gather(boxes, box, self._groups[is_known])
        except RuntimeError as error:
            if is_known:
                raise self._disagreement(own) from error
            raise
        return [one.tolist() for one in boxes]

    def _disagreement(self, own: int) -> StrategyError:
        said = f"calls {self._names[own]}" if own < len(self._names) else "is at its end"
        return StrategyError(
            f"model: rank {dist.get_rank()} {said} in forward {self._count}, where other processes call other FSDP units, or the "
            "same ones in another order or more often; leave out strategy.wrap, so that the model is one unit"
        )

    def _learn(self, forward: _Forward) -> None:
        bits = self._exchange([call.has_backward for call in forward.calls], len(self._units), forward) if forward.calls else []
        order = [_Call(call.unit, False, any(column)) for call, *column in zip(forward.calls, *bits, strict=True)]
        called = {call.unit for call in order}
        for number, unit in enumerate(self._units):  # nobody has called it yet; it follows those that are registered before
            if number not in called and any(parameter.requires_grad for parameter in unit.parameters()):
                before = max((at for at, call in enumerate(order) if call.unit < number), default=-1)
                order.insert(before + 1, _Call(number, False, forward.key))
        self._orders[forward.key] = order

    # Backward

    def _watch(self, output: Any, arrive: Callable[[Tensor], None], call: _Call | None = None) -> None:
        def watch(tensor: Tensor) -> Tensor:
            if tensor.requires_grad and torch.is_grad_enabled():
                if call is not None:
                    call.has_backward = True
                tensor.register_hook(arrive)  # type: ignore[no-untyped-call]
            return tensor

        tree_map_only(Tensor, watch, output)

    def _arrive(self, forward: _Forward, at: int, gradient: Tensor) -> None:
        """Complete the calls that come after the one that backward arrives at, before that one is gathered."""
        if not forward.is_finishing:
            forward.is_finishing = True
            forward.done = len(forward.calls)
            after_backward(partial(self._complete, forward, -1))
        self._complete(forward, at)

    def _complete(self, forward: _Forward, at: int) -> None:
        assert forward.done is not None
        for call in reversed(forward.calls[at + 1 : forward.done]):
            if call.has_backward:
                complete_backward(self._units[call.unit], call.is_passed_by)
        forward.done = min(forward.done, at + 1)
        if at < 0:
            forward.is_finishing = False
