"""Ties: parameters that several stages have, such as an embedding that is the output projection too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ....core.comm.collectives import all_gather_object, group_with_this_process
from ....core.rehearsing import rehearsing
from ...names import tied
from ..layout import Layout


class Ties:
    """Adds the gradients that a parameter gets on several stages, so that its copies stay equal.

    Args:
        model: the whole model, before it is cut.
        ends: names of parameters that the first and the last process keep.
    """

    def __init__(self, model: nn.Module, ends: Iterable[str] = ()) -> None:
        self._first = tied(model)
        self._ends = {self._first.get(name, name) for name in ends}
        self._shared: list[tuple[nn.Parameter, Any]] = []

    def gather(self, model: nn.Module, layout: Layout, axis: str) -> None:
        """Find the parameters that several processes of the axis have; a collective."""
        own = {self._first.get(name, name): p for name, p in model.named_parameters(remove_duplicate=False)}
        everyones = all_gather_object(sorted(own), layout.over(axis).get_group())
        if rehearsing():  # what is tied, or beside the layers, is on several, and these are the first and the last
            several = sorted((self._ends | {*self._first.values()}) & own.keys())
            everyones = [several if i in (0, len(everyones) - 1) else [] for i in range(len(everyones))]
        holders: dict[tuple[int, ...], list[str]] = {}
        for name in sorted(set().union(*everyones)):
            having = tuple(i for i, names in enumerate(everyones) if name in names)
            if len(having) > 1:
                holders.setdefault(having, []).append(name)
        for having, names in sorted(holders.items()):
            group = group_with_this_process([line[i] for i in having] for line in layout.lines(axis))
            if group is not None:
                self._shared += [(own[name], group) for name in names]

    def add(self, optim: Any) -> None:
        """Replace the gradients of shared parameters by their sums over the processes that have them; a collective."""
        for parameter, group in self._of(optim):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            grad: Tensor = parameter.grad
            dist.all_reduce(grad.to_local() if isinstance(grad, DTensor) else grad, group=group)

    def _of(self, optim: Any) -> Iterator[tuple[nn.Parameter, Any]]:
        trained = {id(optim.model_parameter(p)) for group in optim.param_groups for p in group["params"]}
        return ((p, group) for p, group in self._shared if id(p) in trained and p.requires_grad)
