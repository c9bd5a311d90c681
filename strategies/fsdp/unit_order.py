"""FSDP's units in one order on all processes, also where the samples of some do not go through all of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...core.dtensor_private import after_backward, complete_backward, pass_by
from ...core.errors import StrategyError
from ...core.trees import tree_map_only
from ..gathering_order import Forward, GatheringOrder, UnitCall


class UnitOrder(GatheringOrder):
    """Makes every process gather, free and reduce the units in one order.

    A process whose samples do not need a unit gathers it too, at the same position of the order, and reduces zeros for it.
    From the second forward on each process knows which units it has passed by.
    """

    passes_by = True
    advice = "leave out strategy.wrap, so that the model is one unit"

    def _pass_by(self, forward: Forward, number: int, has_backward: bool = False) -> None:
        if number in self._nested:
            raise StrategyError(
                f"model.{self._names[number]}: rank {self._rank} does not call this FSDP unit in forward {self._count}, where "
                f"other processes do, and it has units inside; choose units that do not contain each other, or {self.advice}"
            )
        forward.calls.append(UnitCall(number, is_passed_by=True, has_backward=has_backward))
        pass_by(self._units[number])

    def _leave(self, number: int, unit: nn.Module, args: Any, output: Any) -> None:
        if (forward := self._own()) is not None:
            at = len(forward.calls) - 1
            self._watch(output, partial(self._arrive, forward, at), forward.calls[at])

    def _end(self, root: nn.Module, args: Any, output: Any) -> None:
        forward = self._own()
        super()._end(root, args, output)
        if forward is not None:
            for call, known in zip(forward.calls, () if forward.learns else self._orders[forward.key], strict=False):
                call.has_backward |= known.has_backward
            self._watch(output, partial(self._arrive, forward, len(forward.calls)))

    def _learn(self, forward: Forward) -> list[UnitCall]:
        own = [call.has_backward for call in forward.calls]
        bits = self._exchange(own, len(self._units), forward) if own else []
        order = [UnitCall(call.unit, False, any(column)) for call, *column in zip(forward.calls, *bits, strict=True)]
        for call, known in zip(forward.calls, order, strict=True):
            call.has_backward |= known.has_backward
        called = {call.unit for call in order}
        for number, unit in enumerate(
            self._units
        ):  # nobody has called it yet; it follows those that are registered before
            if number not in called and any(parameter.requires_grad for parameter in unit.parameters()):
                before = max((at for at, call in enumerate(order) if call.unit < number), default=-1)
                order.insert(before + 1, UnitCall(number, False, forward.key))
        return order

    # Backward

    def _watch(self, output: Any, arrive: Callable[[Tensor], None], call: UnitCall | None = None) -> None:
        def watch(tensor: Tensor) -> Tensor:
            if tensor.requires_grad and torch.is_grad_enabled():
                if call is not None:
                    call.has_backward = True
                tensor.register_hook(arrive)  # type: ignore[no-untyped-call]
            return tensor

        tree_map_only(Tensor, watch, output)

    def _arrive(self, forward: Forward, at: int, gradient: Tensor) -> None:
        """Complete the calls that come after the one that backward arrives at, before that one is gathered."""
        if forward.incomplete is None:
            forward.incomplete = len(forward.calls)
            after_backward(partial(self._complete, forward, -1))
        self._complete(forward, at)

    def _complete(self, forward: Forward, at: int) -> None:
        for call in reversed(forward.calls[at + 1 : forward.incomplete]):
            if call.has_backward:
                complete_backward(self._units[call.unit], call.is_passed_by)
        forward.incomplete = None if at < 0 else min(forward.incomplete or 0, at + 1)
