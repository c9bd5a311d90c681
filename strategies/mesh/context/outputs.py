"""Outputs of a model for sequences that are cut: gathered along the sequence on the process that reports."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ....core.errors import StrategyError
from ....core.torch_private import tree_flatten, tree_unflatten
from .batches import CutBatch


def gather_outputs(outputs: Any, batch: CutBatch, mesh: DeviceMesh) -> Any:
    """Return the outputs for the whole batch on the first process of ``mesh``, None on the others; a collective.

    Tensors with the dimension of the sequence are joined in its order, numbers are averaged over the targets.

    Raises:
        StrategyError: a tensor has neither form.
    """
    leaves, tree = tree_flatten(outputs)
    found = [_gathered(leaf, batch, mesh) for leaf in leaves]
    return tree_unflatten(found, tree) if mesh.get_local_rank() == 0 else None


def _gathered(leaf: Any, batch: CutBatch, mesh: DeviceMesh) -> Any:
    if leaf is None:
        return None
    own = batch.shards.length // batch.shards.count
    if not isinstance(leaf, Tensor):
        raise StrategyError(f"model: gives {type(leaf).__name__} in evaluation, cp needs tensors of each position")
    if leaf.ndim == 0 and leaf.is_floating_point():
        value = torch.zeros_like(leaf) if batch.factor == 0 else leaf.detach() * batch.factor
        torch_dist.all_reduce(value, group=mesh.get_group())
        return value / batch.shards.count
    if leaf.ndim <= batch.dim or leaf.shape[batch.dim] != own or batch.size not in (None, leaf.shape[0]):
        raise StrategyError(
            f"model: gives a tensor of shape {tuple(leaf.shape)} in evaluation, cp={batch.shards.count} needs {own} positions of "
            f"this process in dimension {batch.dim}, or a number"
        )
    first = torch_dist.get_process_group_ranks(mesh.get_group())[0]
    sent = leaf.detach().contiguous()
    received = [torch.empty_like(sent) for _ in range(batch.shards.count)] if mesh.get_local_rank() == 0 else None
    torch_dist.gather(sent, received, first, group=mesh.get_group())
    return None if received is None else batch.shards.join(received, batch.dim)
