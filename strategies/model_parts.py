"""Gradient norms and overflows of optimizers on processes that hold different parameters of one replica of a model."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import nn

from ..core.comm import collectives as dist
from ..core.comm.topology import Topology
from ..core.rehearsing import rehearsing
from ..optim.model_group import ModelGroup
from ..optim.wrapper import OptimWrapper
from ..optim.wrapper_dict import OptimWrapperDict


def spread_updates(
    optim: OptimWrapper | OptimWrapperDict,
    parameters: Iterable[tuple[str, nn.Parameter]],
    topology: Topology,
    device: torch.device,
) -> None:
    """Combine norms, clipping and overflows over ``topology.model``; a collective of this group.

    A parameter that several processes hold, under one name or tied in the whole model, counts once. Each of them must
    have its full gradient.

    Args:
        parameters: this process's parameters, by their names in the whole model; a tied one by its first name.
    """
    names = {id(parameter): name for name, parameter in parameters}
    for wrapper in optim.wrappers.values():
        own = {
            names[id(wrapper.model_parameter(parameter))]: parameter
            for group in wrapper.param_groups
            for parameter in group["params"]
        }
        kinds = {parameter.dtype for parameter in own.values()}
        everyones = dist.all_gather_object((set(own), kinds), topology.model)
        before = set().union(*(names for names, _ in everyones[: topology.index_in_model]))
        if rehearsing():  # the others have other parameters
            before = set()
        dtype = functools.reduce(torch.promote_types, set().union(*(kinds for _, kinds in everyones)), torch.float32)
        elsewhere = [parameter for name, parameter in own.items() if name in before]
        wrapper.spread(ModelGroup(topology.model, elsewhere, dtype, device))
