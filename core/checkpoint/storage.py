"""Storage for torch.distributed.checkpoint (DCP) without pickles: one safetensors file per process, and JSON.

DCP plans which rank reads and writes which chunk of a tensor; the code here only moves bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ..errors import CheckpointError
from ..stored_dtypes import DTYPES
from .load.partial_read import Fetch
from .manifest import FileEntry, TensorEntry
from .paths import is_local
from .safetensors_file import SafetensorsFile, write_safetensors


def name_in_file(item: WriteItem) -> str:
    """Name of a chunk in its file: the tensor's key, with the offsets if it is not the whole tensor."""
    data = item.tensor_data
    assert data is not None
    whole = data.chunk.sizes == data.size
    return item.index.fqn if whole else f"{item.index.fqn}@{','.join(map(str, data.chunk.offsets))}"


def write_shard(path: Path, items: Sequence[WriteItem], tensors: Iterable[Tensor]) -> FileEntry:
    """Write chunks of tensors to one safetensors file, with one of them in memory at a time."""
    chunks = {}
    for item in items:
        data = item.tensor_data
        assert data is not None
        chunks[name_in_file(item)] = data.properties.dtype, tuple(data.chunk.sizes)
    return write_safetensors(path, chunks, tensors)


Source = Callable[[str], AbstractContextManager[Fetch]]
"""Context that opens a file by its name."""


class ChunkReader(StorageReader):
    """DCP reader for chunks of tensors that are stored in chunks.

    Args:
        entries: the tensors and their chunks.
        source: opens the files with the chunks.
    """

    def __init__(self, entries: Mapping[str, TensorEntry], source: Source) -> None:
        self.source = source
        self.chunks = {
            MetadataIndex(key, torch.Size(chunk.offsets)): chunk
            for key, entry in entries.items()
            for chunk in entry.chunks
        }
        self.metadata = Metadata(
            state_dict_metadata={
                key: TensorStorageMetadata(
                    properties=TensorProperties(dtype=DTYPES[entry.dtype]),
                    size=torch.Size(entry.shape),
                    chunks=[ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.shape)) for c in entry.chunks],
                )
                for key, entry in entries.items()
            }
        )

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Part of DCP's interface; nothing to do, because the constructor gets the source."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The entries as DCP's Metadata."""
        return self.metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Part of DCP's interface; nothing to do."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Part of DCP's interface; nothing to add."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Part of DCP's interface; nothing to add."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill this process's tensors, file by file."""
        by_file: dict[str, list[Any]] = {}
        for item in plan.items:
            by_file.setdefault(self.chunks[item.storage_index].file, []).append(item)
        for file, items in by_file.items():
            with self.source(file) as fetch:
                for item in items:
                    slices = tuple(slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths, strict=True))
                    target = planner.resolve_tensor(item).detach()
                    fetch.fill(self.chunks[item.storage_index].name, slices, target)
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Part of DCP's interface."""
        return True


def checkpoint_source(folder: Path) -> Source:
    """A source of the checkpoint files in ``folder`` (local or remote) that reads directly into tensors."""

    @contextmanager
    def source(file: str) -> Iterator[Fetch]:
        path = folder / file
        with path.open("rb", buffering=0) if is_local(path) else path.open("rb") as opened:
            yield SafetensorsFile(path, opened)

    return source


def mapped_source(folder: Path) -> Source:
    """A source of safetensors files of any origin in ``folder``, mapped by the safetensors package."""

    @contextmanager
    def source(file: str) -> Iterator[Fetch]:
        try:
            with safe_open(folder / file, framework="pt") as opened:
                # get_slice does not work for a 0-dim tensor.
                yield Fetch(
                    folder / file,
                    lambda name, slices: opened.get_slice(name)[slices] if slices else opened.get_tensor(name),
                )
        except SafetensorError as error:
            raise CheckpointError(f"{folder / file}: is damaged, {error}") from None

    return source
