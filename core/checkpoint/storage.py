"""Storage for torch.distributed.checkpoint that holds no pickle: one safetensors file per rank, JSON beside them.

DCP plans who writes and reads which rectangle of which tensor; these classes only move bytes.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
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
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from ..errors import CheckpointError
from . import layout
from .layout import DTYPE_NAMES, DTYPES, Chunk, Manifest, TensorEntry


class ShardWriter(StorageWriter):
    """Writes a checkpoint directory under a temporary name and gives it its own name when it is complete.

    Args:
        path: the checkpoint directory.
        values: everything that is not a tensor; the coordinator's counts.
        written_by: for the manifest.
    """

    def __init__(self, path: Path, values: Mapping[str, Any], written_by: Mapping[str, str | int]) -> None:
        self.path, self.values, self.written_by = path, values, dict(written_by)
        self._text = b""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Part of DCP's interface; the path was given before."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Make the temporary directory, on the coordinator; DCP tells all ranks if that fails."""
        if is_coordinator:
            self._text = layout.to_json(dict(self.values), "checkpoint")
            layout.begin(self.path)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Part of DCP's interface; nothing to add."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give every rank its file."""
        return [dataclasses.replace(plan, storage_data=f"rank-{i:05d}.safetensors") for i, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's rectangles, one at a time."""
        folder = layout.temporary(self.path)
        if not folder.is_dir():
            raise CheckpointError(
                f"{self.path}: rank 0's directory is not visible here, use storage that all processes share"
            )
        done: Future[list[WriteResult]] = Future()
        done.set_result(write_shard(folder / plan.storage_data, plan.items, planner) if plan.items else [])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write values and manifest, and give the directory its name; on the coordinator."""
        folder = layout.temporary(self.path)
        places = {result.index: result.storage_data for results_of_rank in results for result in results_of_rank}
        tensors = {}
        for key, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            chunks = []
            for chunk in entry.chunks:
                file, name = places[MetadataIndex(key, chunk.offsets)]
                chunks.append(Chunk(offsets=tuple(chunk.offsets), shape=tuple(chunk.sizes), file=file, name=name))
            dtype = DTYPE_NAMES[entry.properties.dtype]
            tensors[key] = TensorEntry(dtype=dtype, shape=tuple(entry.size), chunks=tuple(chunks))
        files = {layout.VALUES: layout.write_file(folder / layout.VALUES, self._text)}
        for file in sorted({file for file, _ in places.values()}):
            files[file] = (folder / file).stat().st_size
        manifest = Manifest(written_by=self.written_by, files=files, tensors=tensors)
        layout.write_file(folder / layout.MANIFEST, manifest.model_dump_json().encode())
        layout.commit(self.path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Part of DCP's interface."""
        return True

    def storage_meta(self) -> StorageMeta | None:
        """Part of DCP's interface; there is none."""
        return None


def write_shard(path: Path, items: Iterable[WriteItem], planner: SavePlanner) -> list[WriteResult]:
    """Write rectangles of tensors to one safetensors file, holding one at a time in memory.

    Source of the file format: https://huggingface.co/docs/safetensors
    """
    header: dict[str, Any] = {}
    results: list[WriteResult] = []
    end = 0
    items = list(items)
    for item in items:
        data = item.tensor_data
        if item.type is WriteItemType.BYTE_IO or data is None:
            raise CheckpointError(f"{item.index.fqn}: is no tensor and cannot be written to {path.name}")
        shape, dtype = tuple(data.chunk.sizes), data.properties.dtype
        if dtype not in DTYPE_NAMES:
            raise CheckpointError(f"{item.index.fqn}: tensors of {dtype} cannot be saved")
        name = (
            item.index.fqn
            if shape == tuple(data.size)
            else f"{item.index.fqn}@{','.join(map(str, data.chunk.offsets))}"
        )
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        results.append(WriteResult(index=item.index, size_in_bytes=end - begin, storage_data=(path.name, name)))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        for item in items:
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, Tensor)
            flat = tensor.detach().to("cpu").contiguous().reshape(-1)
            if flat.numel():
                file.write(flat.view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())
    return results


Part = tuple[slice, ...]
Fetch = Callable[[str, Part], Tensor]
"""(name, part) to that part of the tensor of this name within a file."""
Source = Callable[[str], AbstractContextManager[Fetch]]
"""Opens one file by its name."""


class ChunkReader(StorageReader):
    """Reads rectangles of tensors from wherever their pieces are.

    Args:
        entries: the tensors and their pieces.
        source: opens the files that hold the pieces.
    """

    def __init__(self, entries: Mapping[str, TensorEntry], source: Source) -> None:
        self.source = source
        self.places = {
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
        """Part of DCP's interface; the source was given before."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The entries in DCP's words."""
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
        """Copy what this rank needs into its tensors, file by file."""
        by_file: dict[str, list[Any]] = {}
        for item in plan.items:
            by_file.setdefault(self.places[item.storage_index].file, []).append(item)
        for file, items in by_file.items():
            with self.source(file) as fetch:
                for item in items:
                    part = tuple(slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths, strict=True))
                    target = planner.resolve_tensor(item).detach()
                    found = fetch(self.places[item.storage_index].name, part)
                    if found.numel() != target.numel():
                        raise CheckpointError(f"{file}: is damaged, it has another shape of {item.storage_index.fqn}")
                    target.copy_(found.view(target.shape))
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Part of DCP's interface."""
        return True


def safetensors_source(folder: Path) -> Source:
    """Reads parts of the safetensors files in ``folder`` without reading the rest of them."""

    @contextmanager
    def source(file: str) -> Iterator[Fetch]:
        try:
            with safe_open(folder / file, framework="pt") as opened:
                # A 0-dim tensor has no slice.
                yield lambda name, part: opened.get_slice(name)[part] if part else opened.get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{folder / file}: is damaged, {error}") from None

    return source
