"""The order in which processes call the modules whose parameters they gather together: one for all, or refused."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import nn

from ..core.comm import collectives as dist
from ..core.comm.topology import DataShard
from ..core.dtensor_private import in_backward
from ..core.errors import StrategyError
from ..core.rehearsing import with_values


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


@dataclass
class Forward:
    """A forward of the module whose units are followed.

    Attributes:
        key: forwards of different kinds have orders of their own.
        known: the units that processes came to in such forwards; None: nothing is known, or this process has left that order.
        calls: so far.
        differs: processes called different units.
        incomplete: number of calls that backward has not completed, while it runs.
    """

    key: Hashable
    known: list[int] | None
    calls: list[UnitCall] = field(default_factory=list)
    differs: bool = False
    incomplete: int | None = None


def message_group(data: DataShard, timeout_s: float) -> Any:
    """Return a group of the processes that gather together, for small messages; a collective of all processes."""
    with with_values():
        return dist.group_with_this_process(sorted(set(dist.all_gather_object(data.ranks))), "gloo", timeout_s)


class GatheringOrder:
    """Finds a process that calls other units than the others, before it gathers one that nobody else does.

    In the first forward of a kind the processes tell each other at every unit which one they come to, and learn the order. Afterwards
    each follows it by itself, and one that leaves it waits for the others to tell.

    Args:
        root: the module that is called.
        units: those of its submodules that gather, by name; those inside of others are not looked at.
        data: the processes that gather together.
        rank: of this process, for messages.
        group: from ``message_group``.
        hidden: applied to hooks, which a compiler must not see.
        stage: returns what of the model is called now, where that is not all of it.
    """

    advice = ""

    def __init__(
        self,
        root: nn.Module,
        units: Mapping[str, nn.Module],
        data: DataShard,
        rank: int,
        group: Any,
        hidden: Callable[[Any], Any] = lambda hook: hook,
        stage: Callable[[], Hashable] = lambda: None,
    ) -> None:
        inner = {id(part) for unit in units.values() for part in unit.modules() if part is not unit}
        outermost = {name: unit for name, unit in units.items() if id(unit) not in inner}
        self._names, self._units = list(outermost), list(outermost.values())
        self._data, self._rank, self._group, self._stage = data, rank, group, stage
        self._orders: dict[Hashable, list[int]] = {}
        self._forward: Forward | None = None
        self._count = 0
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
            key = torch.is_grad_enabled(), root.training, self._stage()
            self._forward = Forward(key, self._orders.get(key))

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
            if [*forward.known, len(self._units)][len(forward.calls)] == number:
                return
            forward.known = None
        others = [other for _, _, other in self._tell(number, forward)]
        if (first := min(others)) != number:
            raise StrategyError(
                f"model.{self._names[first]}: rank {self._rank} does not call it in forward {self._count}, where other processes do; "
                f"{self.advice}"
            )
        if max(others) != number:
            raise self._disagreement(number)

    def _tell(self, number: int, forward: Forward, *more: int) -> list[list[int]]:
        """Tell the other processes to which unit this one comes; return what each of them tells."""
        message = [self._count, len(forward.calls), number, *more]
        try:
            found = self._exchange(message)
        except RuntimeError as error:
            raise self._disagreement(number) from error
        if any(other[:2] != message[:2] for other in found):
            raise self._disagreement(number)
        return found

    def _exchange(self, message: Sequence[int]) -> list[list[int]]:
        box = torch.tensor(message, device="cpu")
        boxes = [torch.empty_like(box) for _ in range(self._data.count)]
        torch_dist.all_gather(boxes, box, self._group)
        return [one.tolist() for one in boxes]

    def _disagreement(self, own: int) -> StrategyError:
        said = f"calls {self._names[own]}" if own < len(self._names) else "is at the end"
        return StrategyError(
            f"model: rank {self._rank} {said} in forward {self._count}, where other processes call other modules, in another "
            f"order or more often; {self.advice}"
        )
