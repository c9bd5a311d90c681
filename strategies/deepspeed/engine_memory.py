"""The bytes that DeepSpeed's engine keeps on one process, from the shapes of its shards."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from ..state_memory import StateMemory, size_of, state_of_shapes
from .config import ZeroOptimization
from .engine_internals import Fragment, is_partitioned, own_shard
from .engine_state import EngineState

_SHARDS_GRADIENTS = 2
"""The stage from which on a process keeps the gradients of its shard only."""


def engine_memory(state: EngineState, module: nn.Module, zero: ZeroOptimization, *, trains: bool) -> StateMemory:
    """Return the bytes of parameters, gradients and optimizer state that this process keeps; padding is not counted.

    Args:
        state: the engine's state.
        module: the user's model.
        zero: the stage, and what is offloaded.
        trains: whether there is an optimizer.
    """
    tensors = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    parameters = sum(_held(tensor) for tensor in tensors.values())
    parameters += sum(original.nbytes for original in state.originals.values())
    if not trains:
        return StateMemory(parameters, 0, 0)
    fragments = {id(fragment.parameter): fragment for fragment in state.fragments}
    if zero.stage < _SHARDS_GRADIENTS:
        gradients = sum(p.numel() * p.element_size() for p in module.parameters() if id(p) in fragments)
    else:
        gradients = sum(each.numel * each.parameter.element_size() for each in fragments.values())
    return StateMemory(parameters, gradients, _of_optimizer(state, [*fragments.values()]), _note(zero))


def _held(tensor: Tensor) -> int:
    return own_shard(tensor).to_local().nbytes if is_partitioned(tensor) else size_of(tensor)


def _of_optimizer(state: EngineState, fragments: Sequence[Fragment]) -> int | None:
    masters = sum(each.numel * each.flat.element_size() for each in fragments if each.flat is not each.parameter)
    # The optimizer sees the flat tensors: what it keeps once for each, such as a counter, is there once for many fragments.
    flats: dict[int, list[Fragment]] = {}
    for each in fragments:
        flats.setdefault(id(each.flat), []).append(each)
    groups = state.optimizer.param_groups
    moments = state_of_shapes(
        state.optimizer,
        (((sum(each.numel for each in held),), held[0].flat.dtype, groups[held[0].group]) for held in flats.values()),
    )
    return None if moments is None else masters + moments


def _note(zero: ZeroOptimization) -> str:
    where = {"cpu": "in host memory", "nvme": "in files"}
    parts = (("optimizer state", zero.offload_optimizer), ("parameters", zero.offload_param))
    return ", ".join(
        f"{what} {where[part.device]}" for what, part in parts if part is not None and part.device in where
    )
