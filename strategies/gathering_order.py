"""The order in which processes call the modules whose parameters they gather together: one for all, or refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as torch_dist
from torch import nn

from ..core.comm import collectives as dist
from ..core.comm.topology import DataShard
from ..core.dtensor_private import in_backward
from ..core.errors import StrategyError
from ..core.rehearsing import with_values

_PATIENCE_S = 60.0
"""How long a process that leaves the known order waits for the others: they have all begun the same forward."""


@dataclass
class UnitCall:
    """A call of a unit in a forward, or the passing by of one that is not called."""

    unit: int
    is_passed_by: bool
    has_backward: bool = False


@dataclass
class Forward:
    """A forward of the whole model.

    Attributes:
        key: forwards with and without backward have orders of their own.
        learns: the processes compare every call.
        calls: so far.
        incomplete: number of calls that backward has not completed, while it runs.
    """

    key: bool
    learns: bool
    calls: list[UnitCall] = field(default_factory=list)
    incomplete: int | None = None


def message_groups(data: DataShard, timeout_s: float) -> list[Any]:
    """Return two groups of the processes that gather together, of which the second waits for a minute only; a collective."""
    with with_values():
        sets = sorted(set(dist.all_gather_object(data.ranks)))
        return [dist.group_with_this_process(sets, "gloo", limit) for limit in (timeout_s, _PATIENCE_S)]


class GatheringOrder:
    """Finds a process that calls other units than the others, before it gathers one that nobody else does.

    In the first forward the processes tell each other at every unit which one they come to, and learn the order. Afterwards
    each follows it by itself, and one that leaves it waits for the others to tell.

    Args:
        root: the module that is called.
        units: those of its submodules that gather, by name; those inside of others are not looked at.
        data: the processes that gather together.
        rank: of this process, for messages.
        groups: from ``message_groups``.
        hidden: applied to hooks, which a compiler must not see.
    """

    passes_by: ClassVar[bool] = False
    """Whether a process can take part in gathering a unit that it does not call."""
    advice = ""

    def __init__(
        self,
        root: nn.Module,
        units: Mapping[str, nn.Module],
        data: DataShard,
        rank: int,
        groups: Sequence[Any],
        hidden: Callable[[Any], Any] = lambda hook: hook,
    ) -> None:
        own = {id(unit) for unit in units.values()}
        parts = {id(unit): {id(part) for part in unit.modules() if part is not unit} for unit in units.values()}
        inner = {part for found in parts.values() for part in found}
        outermost = {name: unit for name, unit in units.items() if id(unit) not in inner}
        self._names, self._units = list(outermost), list(outermost.values())
        self._nested = {number for number, unit in enumerate(self._units) if parts[id(unit)] & own}
        self._data, self._rank, self._groups = data, rank, groups
        self._orders: dict[bool, list[UnitCall]] = {}
        self._forward: Forward | None = None
        self._count = 0
        root.register_forward_pre_hook(hidden(self._begin), prepend=True)
        root.register_forward_hook(hidden(self._end), prepend=True)
        for number, unit in enumerate(self._units):
            unit.register_forward_pre_hook(hidden(partial(self._come_to, number)), prepend=True)
            unit.register_forward_hook(hidden(partial(self._leave, number)), prepend=True)

    def _own(self) -> Forward | None:
        """Return the forward that runs; None for one that backward repeats."""
        return None if in_backward() else self._forward

    def _begin(self, root: nn.Module, args: Any) -> None:
        if not in_backward():
            self._count += 1
            key = torch.is_grad_enabled()
            self._forward = Forward(key, key not in self._orders)

    def _come_to(self, number: int, unit: nn.Module, args: Any) -> None:
        if (forward := self._own()) is None:
            return
        self._go_to(number, forward)
        forward.calls.append(UnitCall(number, is_passed_by=False))

    def _leave(self, number: int, unit: nn.Module, args: Any, output: Any) -> None:
        """A unit has been called; for subclasses."""

    def _end(self, root: nn.Module, args: Any, output: Any) -> None:
        if (forward := self._own()) is None:
            return
        self._go_to(len(self._units), forward)
        if forward.learns:
            self._orders[forward.key] = self._learn(forward)
        self._forward = None

    def _go_to(self, number: int, forward: Forward) -> None:
        """Pass by what comes before this unit; the number after the last unit is the end."""
        if not forward.learns:
            ahead = self._orders[forward.key][len(forward.calls) :]
            units = [*(call.unit for call in ahead), len(self._units)]
            at = units.index(number) if number in units else None
            if at == 0 or (at is not None and self.passes_by):
                for call in ahead[:at]:
                    self._pass_by(forward, call.unit, call.has_backward)
                return
            forward.learns = True
        while (next_one := self._next(number, forward)) != number:
            self._pass_by(forward, next_one)

    def _pass_by(self, forward: Forward, number: int, has_backward: bool = False) -> None:
        raise StrategyError(
            f"model.{self._names[number]}: rank {self._rank} does not call it in forward {self._count}, where other processes "
            f"do; {self.advice}"
        )

    def _next(self, own: int, forward: Forward) -> int:
        """Return the first unit that any process comes to now."""
        message = [self._count, len(forward.calls), own]
        found = self._exchange(message, own, forward)
        if any(other[:2] != message[:2] for other in found):
            raise self._disagreement(own)
        first = min(other[2] for other in found)
        if not self.passes_by and first == own and any(other[2] != own for other in found):
            raise self._disagreement(own)
        return first

    def _exchange(self, message: Sequence[int], own: int, forward: Forward) -> list[list[int]]:
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
        said = f"calls {self._names[own]}" if own < len(self._names) else "is at the end"
        return StrategyError(
            f"model: rank {self._rank} {said} in forward {self._count}, where other processes call other modules, in another "
            f"order or more often; {self.advice}"
        )

    def _learn(self, forward: Forward) -> list[UnitCall]:
        return forward.calls
