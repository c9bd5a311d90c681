"""Parameters that an optimizer gets after set-up, whose gradients a strategy would average over no other process."""

from __future__ import annotations

from itertools import chain
from operator import is_

from torch import nn

from ..core.base.errors import StrategyError
from ..optim.wrapper import OptimWrapper


def refuse_added(wrapper: OptimWrapper, module: nn.Module) -> None:
    """Raise StrategyError before an update with a parameter that was neither the model's at set-up, nor the optimizer's.

    Args:
        wrapper: with its optimizer.
        module: the model, as it was set up.
    """
    known = [chain.from_iterable(group["params"] for group in wrapper.param_groups), module.parameters()]
    at_setup = {id(parameter): parameter for parameter in chain(*known)}
    seen: list[object] = []

    def check(wrapper: OptimWrapper) -> None:
        nonlocal seen
        now = [*chain.from_iterable(group["params"] for group in wrapper.param_groups)]
        if len(now) == len(seen) and all(map(is_, now, seen)):
            return
        if new := [parameter for parameter in now if id(parameter) not in at_setup]:
            names = {id(parameter): name for name, parameter in module.named_parameters()}
            raise StrategyError(
                f"model: {names.get(id(new[0]), 'a parameter that it does not have')} was given to the optimizer after set-up "
                "(add_param_group), so its gradients are averaged over no other process; make it in the model's __init__, or end this "
                "run and begin another with load_from"
            )
        seen = now

    wrapper.register_step_pre_hook(check)
