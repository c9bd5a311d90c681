"""Index of what all processes write: the chunks of every tensor, and their files."""

from __future__ import annotations

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan

from ...stored_dtypes import DTYPE_NAMES
from ..manifest import StoredChunk, TensorEntry
from ..storage import name_in_file


class TensorEntries:
    """Entries of all tensors for the manifest, computed from the plans when they are first needed."""

    def __init__(self) -> None:
        self._plans: tuple[list[SavePlan], Metadata] | None = None
        self._entries: dict[str, TensorEntry] = {}

    def plan(self, plans: list[SavePlan], metadata: Metadata) -> None:
        """Set the plans of all processes."""
        self._plans = plans, metadata

    def entries(self) -> dict[str, TensorEntry]:
        """The entries by key. The first call computes them, while training already continues, and drops the plans."""
        if self._plans is not None:
            self._entries, self._plans = _entries(*self._plans), None
        return self._entries


def file_of(rank: int) -> str:
    """Name of the file that ``rank`` writes."""
    return f"rank-{rank:05d}.safetensors"


def _entries(plans: list[SavePlan], metadata: Metadata) -> dict[str, TensorEntry]:
    """The entry of every tensor: its chunks, and the files that they will be in."""
    chunks: dict[str, list[StoredChunk]] = {key: [] for key in metadata.state_dict_metadata}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            assert item.tensor_data is not None
            chunk = item.tensor_data.chunk
            chunks[item.index.fqn].append(
                StoredChunk(
                    offsets=tuple(chunk.offsets), shape=tuple(chunk.sizes), file=file_of(rank), name=name_in_file(item)
                )
            )
    entries = {}
    for key, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata)
        dtype = DTYPE_NAMES[entry.properties.dtype]
        entries[key] = TensorEntry(dtype=dtype, shape=tuple(entry.size), chunks=tuple(chunks[key]))
    return entries
