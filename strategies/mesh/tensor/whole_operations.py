"""Operations that torch's rules for DTensors compute wrongly: computed from whole tensors on every process.

Found with torch 2.15, by every operation of a list with every layout against one device. Some of them raise, and some give
other numbers without an error: the mean of squared differences has a gradient that is as many times too large as there are
shards, a convolution of a pending sum adds its bias for every process, and ``item`` gives a summand of a pending sum.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from ....core.dtensor_private import ITEM, dtensor_handlers
from ....core.torch_private import tree_flatten
from ....core.trees import tree_map_only

_ATEN = torch.ops.aten
WHOLE = (
    _ATEN.convolution.default, _ATEN.convolution_backward.default,
    _ATEN.native_group_norm.default, _ATEN.native_group_norm_backward.default,
    _ATEN.mse_loss.default, _ATEN.mse_loss_backward.default,
    _ATEN.smooth_l1_loss.default, _ATEN.smooth_l1_loss_backward.default,
    _ATEN.huber_loss.default, _ATEN.huber_loss_backward.default,
    _ATEN.binary_cross_entropy.default, _ATEN.binary_cross_entropy_backward.default,
    _ATEN.soft_margin_loss.default, _ATEN.soft_margin_loss_backward.default,
    ITEM, _ATEN.equal.default,
)  # fmt: skip


@functools.cache
def register_whole_operations() -> None:
    """Compute these operations from whole tensors wherever DTensors are used; once in a process."""
    handlers = dtensor_handlers()
    handlers.update(dict.fromkeys(WHOLE, _compute_whole))
    # Autograd writes the gradient of what was written to a view into this, by the strides of the whole tensor.
    handlers[_ATEN.new_empty_strided.default] = _make_whole


@torch.no_grad()
def _compute_whole(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    mesh = next(leaf.device_mesh for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, DTensor))
    args, kwargs = tree_map_only(DTensor, lambda tensor: tensor.full_tensor(), (args, kwargs))
    replicated = (Replicate(),) * mesh.ndim
    found = operation(*args, **kwargs)
    return tree_map_only(Tensor, lambda tensor: DTensor.from_local(tensor, mesh, replicated, run_check=False), found)


@torch.no_grad()
def _make_whole(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor: DTensor = args[0]
    found = operation(tensor.to_local(), *args[1:], **kwargs)
    return DTensor.from_local(found, tensor.device_mesh, (Replicate(),) * tensor.device_mesh.ndim, run_check=False)
