"""Entries of a checkpoint for tensors in foreign files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pydantic

from ...errors import CheckpointError
from ...stored_dtypes import DTYPE_NAMES, DTYPES
from ..load.checkpoint import Checkpoint
from ..saved_tensor import StoredChunk, TensorEntry
from ..untrusted import one_line
from .torch_files import StoredTensor

MODEL = "model."


def label(index: int) -> str:
    """The name that chunks use for file number ``index``: real names of foreign files are not valid in a checkpoint."""
    return f"rank-{index:05d}.safetensors"


def whole(path: Path, name: str, dtype: str, shape: tuple[int, ...]) -> TensorEntry:
    """The entry of a tensor that is one chunk in the first file.

    Raises:
        CheckpointError: checkpoints do not support the dtype.
    """
    if dtype not in DTYPES:
        raise CheckpointError(f"{path}: {name} is of {dtype}, and tensors of that kind cannot be read")
    chunk = StoredChunk(offsets=(0,) * len(shape), shape=shape, file=label(0), name=name)
    return entry(path, name, dtype, shape, [chunk])


def entry(path: Path, name: str, dtype: str, shape: tuple[int, ...], chunks: Sequence[StoredChunk]) -> TensorEntry:
    """The entry of a tensor of chunks.

    Raises:
        CheckpointError: the shape is impossible, or the chunks do not make up the tensor.
    """
    try:
        return TensorEntry(dtype=dtype, shape=shape, chunks=tuple(chunks))
    except pydantic.ValidationError as error:
        reason = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
        raise CheckpointError(f"{path}: {one_line(name)} is damaged, {reason}") from None


def dtype_name(path: Path, name: str, tensor: StoredTensor) -> str:
    """The dtype of a stored tensor, by its name in checkpoints.

    Raises:
        CheckpointError: checkpoints do not support the dtype or the kind of tensor.
    """
    kind = DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype)) if tensor.kind == "strided" else f"a {tensor.kind} kind"
    if kind not in DTYPES:
        raise CheckpointError(f"{path}: {name} is of {kind}, and tensors of that kind cannot be read")
    return kind


def joined(path: Path, parts: Mapping[str, Checkpoint], weight_map: Mapping[str, str]) -> Checkpoint:
    """Join several sources into one.

    Args:
        path: the origin, for messages.
        parts: name of each file to its source.
        weight_map: name of each tensor to the name of its file.

    Raises:
        CheckpointError: a tensor is not in its file.
    """
    numbers = {file: index for index, file in enumerate(parts)}
    entries = {}
    for name, file in weight_map.items():
        found = parts[file].entries.get(MODEL + name)
        if not isinstance(found, TensorEntry):
            raise CheckpointError(f"{path}: says that {one_line(name)} is in {file}, which lacks it")
        chunks = tuple(chunk.model_copy(update={"file": label(numbers[file])}) for chunk in found.chunks)
        entries[MODEL + name] = found.model_copy(update={"chunks": chunks})
    sources = {label(numbers[file]): part.source for file, part in parts.items()}
    origin = next(iter(parts.values())).origin if parts else "safetensors"
    return Checkpoint(path, entries, {}, lambda file: sources[file](label(0)), origin=origin)
