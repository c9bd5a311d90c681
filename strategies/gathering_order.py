"""The order in which processes call the modules whose parameters they gather together: one for all, or refused."""

from __future__ import annotations

import itertools
import zlib
from bisect import insort
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..core.base.errors import StrategyError
from ..core.base.trees import tree_map_only
from ..core.comm import collectives as dist
from ..core.comm.topology import DataShard
from ..core.torch_compat.dtensor_private import (
    before_reducing,
    complete_backward,
    hook_before_freeing,
    is_gathered,
    pass_by,
)
from ..core.torch_compat.torch_private import after_backward, apart, in_backward, with_values


@dataclass
class UnitCall:
    """A call of a unit in a forward, or the passing by of one that is not called.

    Attributes:
        has_backward: some process will compute backward of it.
        has_arrived: this one does.
        inside: what the unit called itself.
    """

    unit: int
    is_passed_by: bool
    has_backward: bool = False
    has_arrived: bool = False
    inside: Forward | None = None


@dataclass(eq=False)
class Forward:
    """A forward of the module whose units are followed.

    Attributes:
        order: of these units.
        began: how many forwards of this process began before.
        key: forwards of different kinds have orders of their own: with or without gradients, in training or not, and of which stage.
        known: the units that processes came to in such forwards; None: nothing is known, or this process has left that order.
        calls: so far.
        differs: processes called different units.
        incomplete: number of calls that backward has not completed, while it runs.
        has_arrived: backward has come to this forward, while it runs.
    """

    order: Any
    began: int
    key: tuple[bool, bool, Hashable]
    known: list[int] | None
    calls: list[UnitCall] = field(default_factory=list)
    differs: bool = False
    incomplete: int | None = None
    has_arrived: bool = False

    def leave(self) -> None:
        """Backward has left it."""
        self.incomplete = self.order._backward = None


@dataclass
class Together:
    """What the orders of a model have in common.

    Attributes:
        data: the processes that gather together.
        rank: of this process, for messages.
        group: from ``message_group``.
        hidden: applied to hooks, which a compiler must not see.
        stage: returns what of the model is called now, where that is not all of it.
        roots: the number of modules that are called directly.
        orders: how many there are by now.
        open: forwards of the roots that backward may still come to, in the order in which they began.
    """

    data: DataShard
    rank: int
    group: Any
    hidden: Callable[[Any], Any] = lambda hook: hook
    stage: Callable[[], Hashable] = lambda: None
    roots: int = 1
    orders: int = 0
    open: list[Forward] = field(default_factory=list)


_numbers = itertools.count()


def message_group(data: DataShard, timeout_s: float) -> Any:
    """Return a group of the processes that gather together, for small messages; a collective of all processes."""
    with with_values():
        return dist.group_with_this_process(sorted(set(dist.all_gather_object(data.ranks))), "gloo", timeout_s)


_START = -1
"""What is told where the number of a unit is, before the first one."""


class GatheringOrder:
    """Finds a process that calls other units than the others, before it gathers one that nobody else does.

    In the first forward of a kind the processes tell each other at every unit which one they come to, and learn the order. Afterwards
    each follows it by itself, to the end of the forward or to a unit that is waited for, where all tell again; one that leaves it
    tells that, and waits until the others do.

    Where several modules are called directly, the processes also tell which one, before it gathers parameters of its own.

    Args:
        root: the module that is called.
        name: of the root in the model.
        units: those of its submodules that gather, by name.
        together: what it has in common with other orders of the model.
        waits: whether a process that came to this unit alone would now wait for the others, and could not tell them at the end.
    """

    advice = ""
    _is_inner = False

    def __init__(
        self,
        root: nn.Module,
        name: str,
        units: Mapping[str, nn.Module],
        together: Together,
        waits: Callable[[nn.Module], bool] = lambda unit: False,
    ) -> None:
        self._root, self._name, self._names, self._units = root, name, list(units), list(units.values())
        self._together, self._data, self._rank, self._group = together, together.data, together.rank, together.group
        self._waits, self._number = waits, together.orders
        together.orders += 1
        self._orders: dict[Hashable, list[int]] = {}
        self._forward: Forward | None = None
        self._count = 0
        hidden = together.hidden
        root.register_forward_pre_hook(hidden(self._begin), prepend=True)
        self._register_end(root, hidden(self._end))
        for number, unit in enumerate(self._units):
            unit.register_forward_pre_hook(hidden(partial(self._come_to, number)), prepend=True)
            self._register_end(unit, hidden(partial(self._leave, number)))

    def _register_end(self, module: nn.Module, hook: Callable[..., Any]) -> None:
        module.register_forward_hook(hook, prepend=True)

    def _own(self) -> Forward | None:
        """Return the forward that runs; None for one that backward repeats."""
        return None if in_backward() else self._forward

    def _begin(self, root: nn.Module, args: Any) -> None:
        if not in_backward():
            self._count += 1
            key = torch.is_grad_enabled(), root.training, self._together.stage()
            self._forward = Forward(self, next(_numbers), key, self._orders.get(key))
            if self._together.roots > 1 and not self._is_inner:
                self._tell(_START, self._forward, 0)

    def _come_to(self, number: int, unit: nn.Module, args: Any) -> None:
        if (forward := self._own()) is None:
            return
        self._go_to(number, forward)
        forward.calls.append(UnitCall(number, is_passed_by=False))

    def _leave(self, number: int, unit: nn.Module, args: Any, output: Any) -> None:
        """A unit has been called; for subclasses."""

    def _end(self, root: nn.Module, args: Any, output: Any) -> Any:
        if (forward := self._own()) is not None:
            self._go_to(len(self._units), forward)
            self._orders[forward.key] = [call.unit for call in forward.calls]
            self._forward = None

    def _go_to(self, number: int, forward: Forward) -> None:
        """Make sure that all processes come to this unit now; the number after the last unit is the end."""
        if forward.known is not None:
            if self._known_at(len(forward.calls), forward.known) != number:
                forward.known = None
            elif number < len(self._units) and not self._waits(self._units[number]):
                return
        others = [other for (other,) in self._tell(number, forward)]
        if (last := max(others)) != (first := min(others)):
            raise self._departure(self._data.ranks[others.index(last)], last, first)

    def _known_at(self, position: int, known: Sequence[int]) -> int:
        return known[position] if position < len(known) else len(self._units)

    def _tell(self, number: int, forward: Forward, *more: int) -> list[list[int]]:
        """Tell the other processes to which unit this one comes, and more; return what each of them tells."""
        stage = zlib.crc32(repr(forward.key[2]).encode())  # as hash() is not, the same on all processes
        head = [self._number, self._count, *map(int, forward.key[:2]), stage]
        message = [*head, len(forward.calls), number, *more]
        try:
            found = self._exchange(message)
        except RuntimeError as error:
            raise self._disagreement(number) from error
        if any(other[:5] != head for other in found):
            raise self._disagreement(number)
        if any(other[5] != len(forward.calls) for other in found):
            left = min(range(len(found)), key=lambda i: found[i][5])
            known = self._known_at(found[left][5], self._orders.get(forward.key, ()))
            raise self._departure(self._data.ranks[left], found[left][6], known)
        return [other[6:] for other in found]

    def _exchange(self, message: Sequence[int]) -> list[list[int]]:
        with apart():  # in a forward that backward repeats without it
            return dist.all_gather_small(message, self._group)

    def _departure(self, rank: int, own: int, others: int) -> StrategyError:
        """The error where a process has come to another unit, or the end, than others."""
        if own == others:
            return self._disagreement(own)
        they = f"call {self._names[others]}" if others < len(self._names) else "are at the end"
        return StrategyError(
            f"model.{self._names[min(own, others)]}: rank {rank} {self._doing(own)} in forward {self._count}, where other processes "
            f"{they}; {self.advice}"
        )

    def _doing(self, number: int) -> str:
        if number == _START:
            return f"calls {self._name}"
        return f"calls {self._names[number]}" if number < len(self._names) else "is at the end"

    def _disagreement(self, own: int) -> StrategyError:
        return StrategyError(
            f"model: rank {self._rank} {self._doing(own)} in forward {self._count}, where other processes call other modules, in another "
            f"order or more often; {self.advice}"
        )


# FSDP's units in one order on all processes, also where the samples of some do not go through all of them.


class UnitOrder(GatheringOrder):
    """Makes every process gather, free and reduce the units in one order.

    A process whose samples do not need a unit gathers it too, at the same position of the order, and reduces zeros for it. It
    follows the order of the forwards before, to its end. There all processes tell whether they go on, and of which units they
    will compute backward; what they come to then, they tell one by one.

    Args:
        inner: the orders of the units that have units inside, by name. A unit's own order is made before that of what it is in.
    """

    advice = "call the model, and what its train_step calls, as often and in one order on every process"

    def __init__(
        self,
        root: nn.Module,
        name: str,
        units: Mapping[str, nn.Module],
        together: Together,
        inner: Mapping[str, UnitOrder],
    ) -> None:
        inside = {id(part) for unit in units.values() for part in unit.modules() if part is not unit}
        outermost = {name: unit for name, unit in units.items() if id(unit) not in inside}
        super().__init__(root, name, outermost, together)
        self._open = together.open
        self._inner = {number: inner[name] for number, name in enumerate(self._names) if name in inner}
        for order in self._inner.values():
            order._is_inner, order._open = True, []
        self.last: Forward | None = None
        self._backward: Forward | None = None
        before_reducing(root, self._complete_own)

    def _begin(self, root: nn.Module, args: Any) -> None:
        if not in_backward() and any(forward.incomplete is not None for forward in self._open):
            for forward in self._open:  # an error has ended a backward
                forward.leave()
            self._open.clear()
        super()._begin(root, args)

    def _register_end(self, module: nn.Module, hook: Callable[..., Any]) -> None:
        hook_before_freeing(module, hook)

    def _go_to(self, number: int, forward: Forward) -> None:
        ahead = (forward.known or [])[len(forward.calls) :]
        is_known = number in ahead
        for unit in ahead[: ahead.index(number)] if is_known else ahead:
            self._pass_by(forward, unit)
        while not is_known:
            own = [(call.unit, call.is_passed_by, call.has_backward) for call in forward.calls]
            found = self._tell(number, forward, hash(tuple(own)))
            first = min(other for other, _ in found)
            if first == number:
                is_known = True
                if number == len(self._units):
                    self._agree(forward, are_equal=len({calls for _, calls in found}) == 1)
            else:
                self._pass_by(forward, first)

    def _pass_by(self, forward: Forward, number: int) -> None:
        unit, inner = self._units[number], self._inner.get(number)
        call = UnitCall(number, is_passed_by=True)
        forward.calls.append(call)
        with pass_by(unit):
            if inner is not None:
                inner._begin(unit, ())
                inner._end(unit, (), None)
                call.inside = inner.last

    def _come_to(self, number: int, unit: nn.Module, args: Any) -> None:
        super()._come_to(number, unit, args)
        if in_backward() and self._backward is not None and self._backward.differs and not is_gathered(unit):
            raise StrategyError(
                f"model.{self._names[number]}: rank {self._rank} recomputes it in backward together with other FSDP units, in forward "
                f"{self._count}, where other processes call other units; recompute inside of each unit, or leave out strategy.wrap"
            )

    def _leave(self, number: int, unit: nn.Module, args: Any, output: Any) -> None:
        if (forward := self._own()) is not None:
            call = forward.calls[-1]
            if number in self._inner:
                call.inside = self._inner[number].last
            if self._watch(output, partial(self._arrive, forward, len(forward.calls) - 1)):
                call.has_backward = True

    def _end(self, root: nn.Module, args: Any, output: Any) -> Any:
        if (forward := self._own()) is None:
            return None
        if self._units:
            self._go_to(len(self._units), forward)
        self._forward, self.last = None, forward
        if self._is_inner:  # another tensor than a unit inside has returned, so that backward comes here first
            return tree_map_only(Tensor, lambda tensor: tensor.view_as(tensor), output)
        if forward.key[0]:
            self._open.append(forward)
            del self._open[:-_MOST_OPEN]
        self._watch(output, partial(self._arrive, forward, len(forward.calls)))
        return None

    def _agree(self, forward: Forward, are_equal: bool) -> None:
        """Agree on the calls that backward completes, and on the order of later forwards if this one had more than was known."""
        own = [2 * call.has_backward + (not call.is_passed_by) for call in forward.calls]
        everyones = [own] if are_equal or not own else self._exchange(own)
        forward.differs = not are_equal
        for call, column in zip(forward.calls, zip(*everyones, strict=True), strict=True):
            call.has_backward = any(bits & 2 for bits in column)
        if forward.known is None or len(forward.calls) > len(forward.known):
            called = [
                [call.unit for call, bits in zip(forward.calls, row, strict=True) if bits & 1] for row in everyones
            ]
            self._orders[forward.key] = merged([forward.known or [], *called])

    # Backward

    def _watch(self, output: Any, arrive: Callable[[Tensor], None]) -> bool:
        """Call ``arrive`` when backward comes to a tensor of the output; return whether it can."""
        watched = []

        def watch(tensor: Tensor) -> Tensor:
            if tensor.requires_grad and torch.is_grad_enabled():
                watched.append(tensor.register_hook(arrive))  # type: ignore[no-untyped-call]
            return tensor

        tree_map_only(Tensor, watch, output)
        return bool(watched)

    def _arrive(self, forward: Forward, at: int, gradient: Tensor) -> None:
        """Complete the calls that come after the one that backward arrives at, before that one is gathered."""
        self._enter_backward(forward)
        forward.has_arrived = True
        self._complete_newer(forward)
        self._complete(forward, at)
        for call in forward.calls[at : at + 1]:
            call.has_arrived = True
            if call.inside is not None:
                self._inner[call.unit]._enter_backward(call.inside)

    def _enter_backward(self, forward: Forward) -> None:
        self._backward = forward
        if forward.incomplete is None:
            if not self._is_inner and all(other.incomplete is None for other in self._open):
                after_backward(self._complete_all)
            forward.incomplete, forward.has_arrived = len(forward.calls), False
            for call in forward.calls:
                call.has_arrived = False
            if forward not in self._open:  # backward comes to it once more
                insort(self._open, forward, key=lambda other: other.began)

    def _complete_newer(self, forward: Forward) -> None:
        """Complete the forwards that began after this one: backward has left them, also where it did not come to them."""
        while (last := self._open[-1]) is not forward:
            order: UnitOrder = last.order
            order._enter_backward(last)
            if order is self:
                order._complete(last, -1)
            else:  # the order that backward comes to next reduces its own parameters
                with order._own_parameters(last):
                    order._complete(last, -1)
            last.leave()
            self._open.pop()
        self._backward = forward

    def _own_parameters(self, forward: Forward) -> AbstractContextManager[None]:
        """Context around the completion of a forward of a root, before backward comes to another root."""
        if not any(parameter.requires_grad for parameter in self._root.parameters()):
            return nullcontext()
        return complete_backward(self._root, gathers=not forward.has_arrived)

    def _complete_own(self) -> None:
        """Complete the forward of this order that backward is in, and those that began after it."""
        if (forward := self._backward) is not None and forward.incomplete is not None:
            self._complete_newer(forward)
            self._complete(forward, -1)

    def _complete_all(self) -> None:
        for forward in reversed([forward for forward in self._open if forward.incomplete is not None]):
            forward.order._complete(forward, -1)
            forward.leave()
        self._open.clear()

    def _complete(self, forward: Forward, at: int) -> None:
        begin, end = at + 1, forward.incomplete or 0
        forward.incomplete = min(end, begin)
        for call in reversed(forward.calls[begin:end]):
            if call.has_backward:
                inner = self._inner.get(call.unit)
                with complete_backward(self._units[call.unit], gathers=not call.has_arrived):
                    if inner is not None and call.inside is not None:
                        if not call.has_arrived:
                            inner._enter_backward(call.inside)
                        inner._complete_all()


_MOST_OPEN = 1000
"""Forwards that no backward comes to are forgotten, the oldest first."""


def merged(orders: Sequence[Sequence[int]]) -> list[int]:
    """Return an order that has each of these inside, without repeating what they have in common as far as that is seen."""
    found: list[int] = []
    while orders := [order for order in orders if order]:
        first = min((order[0] for order in orders), key=lambda unit: (any(unit in each[1:] for each in orders), unit))
        found.append(first)
        orders = [order[1:] if order[0] == first else order for order in orders]
    return found
