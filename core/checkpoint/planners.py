"""Planners for torch.distributed.checkpoint that add layouts of several chunks, which torch plans wrongly."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from ..dtensor_chunks import chunks_of, cut_more_than_once
from ..errors import CheckpointError
from .flat_shard import FlatShard

Chunks = dict[tuple[int, ...], Tensor]


def _split(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Chunks]]:
    """Split a state into the values that torch plans correctly, and the chunks of the other tensors."""
    chunks = {key: found for key, value in state.items() if (found := _chunks_of(key, value)) is not None}
    return {key: value for key, value in state.items() if key not in chunks}, chunks


def _chunks_of(key: str, tensor: Any) -> Chunks | None:
    """This process's chunks of a tensor; None if torch plans it correctly."""
    if isinstance(tensor, FlatShard):
        return tensor.chunks()
    if not (isinstance(tensor, DTensor) and cut_more_than_once(tensor)):
        return None
    try:
        return chunks_of(tensor)
    except ValueError as error:
        raise CheckpointError(f"{key}: {error}") from error


def layout_of(key: str, tensor: Tensor) -> Any:
    """The layout of a tensor: as long as it is equal, the plan for saving the tensor is equal."""
    # torch's enable_plan_caching (from 2.7) is not used: it makes every plan again to compare it, which takes 96 ms for
    # 3,000 tensors (this: 1.4 ms), and it keeps one plan for all states and any number of processes.
    if isinstance(tensor, FlatShard):
        return tensor.dtype, tensor.shape, tensor.start, tensor.to_local().shape
    if isinstance(tensor, DTensor) and type(tensor.to_local()) in _WHOLE:
        return tensor.dtype, tensor.shape, tensor.device_mesh, tensor.placements
    if type(tensor) in _WHOLE:
        return tensor.dtype, tensor.shape
    return create_default_local_save_plan({key: tensor}, False).items  # only its class knows the layout


_WHOLE = (Tensor, nn.Parameter)


class ShardSavePlanner(DefaultSavePlanner):
    """torch's planner for saving, with one item for each chunk of a tensor."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._own: dict[str, Tensor] = {}
        self._chunks: dict[str, Chunks] = {}

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Give torch the state without the tensors of several chunks."""
        rest, self._chunks = _split(state_dict)
        self._own = {key: state_dict[key] for key in self._chunks}
        super().set_up_planner(rest, storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        """Return torch's plan with one item more for each chunk."""
        plan = super().create_local_plan()
        own = [item for key, tensor in self._own.items() for item in _write_items(key, tensor, self._chunks[key])]
        self.plan = dataclasses.replace(plan, items=[*plan.items, *own])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The chunk, or the object of torch's planner, for an item of the plan."""
        if index.fqn in self._chunks:
            assert index.offset is not None
            return self._chunks[index.fqn][tuple(index.offset)]
        return super().lookup_object(index)


def _write_items(key: str, tensor: Tensor, chunks: Chunks) -> list[WriteItem]:
    properties = TensorProperties(dtype=tensor.dtype)
    return [
        WriteItem(
            index=MetadataIndex(key, torch.Size(offsets)),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(torch.Size(offsets), chunk.size()), properties=properties, size=tensor.size()
            ),
        )
        for offsets, chunk in chunks.items()
    ]


class ShardLoadPlanner(DefaultLoadPlanner):
    """torch's planner for loading, which also fills the chunks of a tensor in place."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._chunks: dict[str, Chunks] = {}

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Give torch the state without the tensors of several chunks."""
        rest, self._chunks = _split(state_dict)
        super().set_up_planner(rest, metadata, is_coordinator)

    def create_local_plan(self) -> LoadPlan:
        """Return torch's plan with the read items of each chunk."""
        items = list(super().create_local_plan().items)
        assert self.metadata is not None
        for key, chunks in self._chunks.items():
            saved = self.metadata.state_dict_metadata[key]
            assert isinstance(saved, TensorStorageMetadata)
            wanted = [ChunkStorageMetadata(torch.Size(offsets), chunk.size()) for offsets, chunk in chunks.items()]
            items += create_read_items_for_chunk_list(key, saved, wanted)
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The chunk, or the tensor of torch's planner, that an item of the plan fills."""
        if index.fqn in self._chunks:
            assert index.offset is not None
            return self._chunks[index.fqn][tuple(index.offset)]
        return super().lookup_tensor(index)  # type: ignore[no-any-return,unused-ignore]
