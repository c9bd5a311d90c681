"""The chunks of a tensor that this process holds, whatever class the tensor is of."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.tensor import DTensor

from ..dtensor_chunks import chunks_of
from ..errors import CheckpointError
from ..rehearsing import rehearsing
from ..rehearsing_private import is_fake
from .flat_shard import FlatShard

Offsets = tuple[int, ...]
ORDINARY = (Tensor, nn.Parameter)


def is_ordinary(tensor: Tensor) -> bool:
    """Whether the tensor is whole on this process, and no class of its own says what it holds."""
    return type(tensor) in ORDINARY or (rehearsing() and is_fake(tensor))


def is_cut_by_rule(tensor: Tensor) -> bool:
    """Whether the tensor is a DTensor whose local tensor is what its placements say."""
    return isinstance(tensor, DTensor) and is_ordinary(tensor.to_local())


@torch.no_grad()  # outside of it, to_local() records an autograd graph
def held_chunks(key: str, tensor: Tensor) -> dict[Offsets, Tensor]:
    """Offsets in the whole tensor to a view of this process's memory, for every chunk that it holds.

    Args:
        key: the tensor's key, for messages.
        tensor: an ordinary tensor, a FlatShard, a DTensor, or one of a class that torch.distributed.checkpoint knows.

    Raises:
        CheckpointError: a sum over processes is pending, or the local tensor does not fit the placements.
    """
    if isinstance(tensor, FlatShard):
        return tensor.chunks()
    if is_ordinary(tensor):
        return {(0,) * tensor.dim(): tensor.detach()}
    if not is_cut_by_rule(tensor):
        return _of_own_class(key, tensor)
    try:
        return chunks_of(cast(DTensor, tensor))
    except ValueError as error:
        raise CheckpointError(f"{key}: {error}") from error


def _of_own_class(key: str, tensor: Tensor) -> dict[Offsets, Tensor]:
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner({key: tensor})
    found = {}
    for item in create_default_local_save_plan({key: tensor}, False).items:
        chunk = planner.resolve_data(item)
        assert isinstance(chunk, Tensor)
        assert item.tensor_data is not None
        found[tuple(item.tensor_data.chunk.offsets)] = chunk.detach()
    return found
