"""Make a whole model of DTensors: whatever the plan, its results are those of one device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from ....core.torch_private import tree_map_only

_DIMENSIONS = {"colwise": 0, "rowwise": 1}


def distribute_model(model: nn.Module, mesh: DeviceMesh, styles: Mapping[str, str]) -> None:
    """Replace every parameter and buffer by a DTensor, sharded by the style of its module, replicated without one.

    DTensor derives the layout of every activation, and communicates where an operation needs it. Therefore a plan decides
    how fast a model is, and never what it computes.
    """
    made: dict[int, nn.Parameter] = {}
    for name, module in model.named_modules():
        style = styles.get(name)
        for key, parameter in [*module.named_parameters(recurse=False, remove_duplicate=False)]:
            if id(parameter) not in made:  # a tied one has the style of the first module that has it
                placed = distribute_tensor(parameter.detach(), mesh, [_placement(style, parameter)], src_data_rank=None)
                made[id(parameter)] = nn.Parameter(placed, requires_grad=parameter.requires_grad)
            setattr(module, key, made[id(parameter)])
        for key, buffer in [*module.named_buffers(recurse=False, remove_duplicate=False)]:
            setattr(module, key, distribute_tensor(buffer, mesh, (Replicate(),), src_data_rank=None))
        if style == "rowwise":  # nothing may see a part of a sum, least of all dropout
            module.register_forward_hook(_reduce_output)


def _placement(style: str | None, parameter: Tensor) -> Placement:
    if style is None or (style == "rowwise" and parameter.ndim < 2):
        return Replicate()
    return Shard(_DIMENSIONS[style])


def _reduce_output(module: nn.Module, args: Any, output: Any) -> Any:
    return tree_map_only(DTensor, lambda tensor: tensor.redistribute(placements=(Replicate(),)), output)


def as_replicated(mesh: DeviceMesh, values: Any) -> Any:
    """Return ``values`` with every ordinary tensor as a replicated DTensor."""

    def replicate(tensor: Tensor) -> Tensor:
        if isinstance(tensor, DTensor):
            return tensor
        return cast(Tensor, DTensor.from_local(tensor, mesh, (Replicate(),), run_check=False))

    return tree_map_only(torch.Tensor, replicate, values)


def as_local(values: Any) -> Any:
    """Return ``values`` with the whole of every DTensor."""
    return tree_map_only(DTensor, lambda tensor: tensor.full_tensor(), values)
