"""Write ``torch.save`` files tensor by tensor, and replace files atomically."""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol

import torch
from torch import Tensor

from ...errors import CheckpointError
from ...json_values import taken_from, unpack
from ...torch_private import REBUILD_TENSOR, REBUILD_TENSOR_OF_DTYPE
from ..directory import sync_directory
from ..safetensors_file import bytes_of
from .extra_state import ExtraState
from .target import make

# torch aligns tensors in its zip files to this many bytes.
_ALIGNMENT = 64
_WRITE_BYTES = 16 * 2**20


class Weight(Protocol):
    """Name, shape and dtype of a tensor, known before it is read."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def nbytes(self) -> int: ...


class Pending:
    """Context with a temporary file that is renamed when it is complete and synced to disk; an error removes it.

    Args:
        path: the final name; an existing file of this name is replaced; its folder is made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")

    def __enter__(self) -> Path:
        make(self.path.parent, self.path)
        return self.temporary

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if kind is None:
                with self.temporary.open("rb") as file:
                    os.fsync(file.fileno())
                self.temporary.replace(self.path)
                sync_directory(self.path.parent)
        finally:
            self.temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise CheckpointError(f"{self.path}: could not be written, {error.strerror or error}") from error


def write_torch(
    path: Path,
    weights: Sequence[Weight],
    aliases: Mapping[str, str],
    fetch: Callable[[Any], Tensor],
    extra: Sequence[ExtraState] = (),
) -> None:
    """Write a state dict in the format of ``torch.save``; an alias shares the memory of its tensor.

    Source of the format: https://docs.pytorch.org/docs/stable/notes/serialization.html
    """
    described: OrderedDict[str, _Described] = OrderedDict(
        (weight.name, _Described(_Storage(str(number), weight), weight)) for number, weight in enumerate(weights)
    )
    content: OrderedDict[str, Any] = OrderedDict(described)
    for alias, name in aliases.items():
        content[alias] = described[name]
    parts = {tensor.key: tensor for state in extra for tensor in state.tensors}
    for number, (key, tensor) in enumerate(parts.items(), len(weights)):
        described[key] = _Described(_Storage(str(number), tensor), tensor)
    for state in extra:
        content[state.name] = unpack(state.value, taken_from(lambda i, state=state: described[state.tensors[i].key]))  # type: ignore[misc]
    weights = [*weights, *parts.values()]
    text = io.BytesIO()
    _Pickler(text, protocol=2).dump(content)
    with path.open("wb") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(zipfile.ZipInfo("archive/data.pkl"), text.getvalue())
        archive.writestr(zipfile.ZipInfo("archive/byteorder"), b"little")
        for number, weight in enumerate(weights):
            with _record(file, archive, f"archive/data/{number}", weight.nbytes) as record:
                _write(record, fetch(weight))
        archive.writestr(zipfile.ZipInfo("archive/version"), b"3\n")


def _write(file: IO[bytes], tensor: Tensor) -> None:
    data = bytes_of(tensor)
    for begin in range(0, len(data), _WRITE_BYTES):
        file.write(data[begin : begin + _WRITE_BYTES])


def _record(file: IO[bytes], archive: zipfile.ZipFile, name: str, size: int) -> IO[bytes]:
    """Open a record of a zip file whose content begins at an aligned offset."""
    info = zipfile.ZipInfo(name)
    info.file_size = size
    is_large = size * 1.05 > zipfile.ZIP64_LIMIT
    # A local header has 30 bytes and the name, 20 bytes of sizes for a large record, and 4 bytes before the padding.
    begin = file.tell() + 30 + len(name) + (20 if is_large else 0) + 4
    padding = -begin % _ALIGNMENT
    info.extra = b"FB" + struct.pack("<H", padding) + b"Z" * padding
    return archive.open(info, "w", force_zip64=is_large)


class _Storage:
    """Placeholder for the memory of a tensor, which is written as a record of its own."""

    def __init__(self, key: str, weight: Weight) -> None:
        self.key, self.weight = key, weight


class _Described:
    """Placeholder that is pickled like a tensor."""

    def __init__(self, storage: _Storage, weight: Weight) -> None:
        self.storage, self.weight = storage, weight

    def __reduce__(self) -> tuple[Any, ...]:
        weight = self.weight
        meta = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
        arguments: tuple[Any, ...] = (self.storage, 0, weight.shape, meta.stride(), False, OrderedDict())
        if weight.dtype in _STORAGES:
            return REBUILD_TENSOR, arguments
        return REBUILD_TENSOR_OF_DTYPE, (*arguments, weight.dtype, None)


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: object) -> tuple[Any, ...] | None:
        if not isinstance(obj, _Storage):
            return None
        weight = obj.weight
        kind = _STORAGES.get(weight.dtype, torch.storage.UntypedStorage)
        count = weight.nbytes if kind is torch.storage.UntypedStorage else weight.nbytes // weight.dtype.itemsize
        return "storage", kind, obj.key, "cpu", count


# Newer dtypes have no storage class; torch pickles their memory as bytes.
_STORAGES: Mapping[torch.dtype, type] = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
    torch.complex64: torch.ComplexFloatStorage,
    torch.complex128: torch.ComplexDoubleStorage,
}
