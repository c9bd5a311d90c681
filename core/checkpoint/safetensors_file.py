"""Write safetensors files tensor by tensor, and read parts of them directly into tensors.

The safetensors package needs all tensors of a file in memory to write it. It maps files to read them, which takes the
memory twice, and remote files cannot be mapped. Files of other programs are read here too.

A complex tensor is stored as ``torch.view_as_real`` shows it, with a last dimension of 2, because the format has only one
complex dtype and older readers not even that. The metadata's ``complex`` names these tensors, as a list in JSON.

Source of the file format: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ..base.errors import CheckpointError
from ..base.events import heartbeat
from ..base.tensors import DTYPE_NAMES, DTYPES, PAIRS, stored_row
from .directory import check_length, write_file
from .manifest import FileEntry, known_dtype
from .untrusted import MAX_JSON_BYTES, one_line

# Read parts of tensors from an open file.


Slices = tuple[slice, ...]


class Fetch:
    """Reads parts of tensors from one file: ``fetch(name, slices)``.

    Args:
        path: the file, for messages.
        read: function that reads a part of a tensor.
    """

    def __init__(self, path: Path, read: Callable[[str, Slices], Tensor]) -> None:
        self.path, self._read = path, read

    def __call__(self, name: str, slices: Slices) -> Tensor:
        """Read a part of the tensor ``name``."""
        return self._read(name, slices)

    def check(self, name: str, dtype: torch.dtype, shape: Sequence[int]) -> None:
        """Check that the file has ``name`` as the index says; a file without an index of its own is the index itself.

        Raises:
            CheckpointError: dtype or shape differ, so that other elements would be read, or rounded ones.
        """

    def fill(self, name: str, slices: Slices, target: Tensor) -> None:
        """Copy a part of a tensor into ``target``, which may have any shape of as many elements, any dtype and device.

        Raises:
            CheckpointError: the number of elements differs.
        """
        found = self(name, slices)
        if found.numel() != target.numel():
            raise CheckpointError(f"{self.path}: is damaged, it has another shape of {name}")
        target.copy_(found.view(target.shape))
        heartbeat()


# Size of the buffer for a tensor that has to be converted or moved to a device.
_BLOCK_BYTES = 2**24
_COMPLEX = "complex"
_OF_PAIRS = {real: dtype for dtype, real in PAIRS.items()}


@dataclass(frozen=True)
class _Entry:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    """Offset in the file, in bytes."""


def write_safetensors(
    path: Path,
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    values: Iterable[Tensor],
    metadata: Mapping[str, str] | None = None,
    pairs: bool = True,
) -> FileEntry:
    """Write a file and sync it to disk, with one tensor in memory at a time; return its size and checksum.

    Args:
        path: path of the file; an existing file is overwritten.
        tensors: name to dtype and shape.
        values: the tensors in the same order.
        metadata: the file's metadata.
        pairs: store complex tensors as pairs; False: as they are, which only safetensors from 0.6 on can read.

    Raises:
        CheckpointError: the header would be too long to read.
    """
    text = header_of(tensors, metadata, pairs)
    check_length(path, text)
    return write_file(path, itertools.chain((len(text).to_bytes(8, "little"), text), map(bytes_of, values)))


def header_of(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    metadata: Mapping[str, str] | None = None,
    pairs: bool = True,
) -> bytes:
    """The header of a file; for the arguments see ``write_safetensors``."""
    described = dict(metadata or {})
    paired = {name for name, (dtype, _) in tensors.items() if pairs and dtype in PAIRS}
    if paired:
        described[_COMPLEX] = json.dumps(sorted(paired))
    header: dict[str, Any] = {"__metadata__": described} if described else {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        stored, dims = (PAIRS[dtype], [*shape, 2]) if name in paired else (dtype, list(shape))
        header[name] = {"dtype": DTYPE_NAMES[stored], "shape": dims, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor as the file has them; a contiguous tensor on the CPU shares its memory."""
    return stored_row(tensor.to("cpu")).view(torch.uint8).numpy().data


class SafetensorsFile(Fetch):
    """An open safetensors file.

    Args:
        path: the file, for messages and its size.
        file: open, at its beginning.
        begin: offset in bytes at which the format begins, if something else is before it.

    Raises:
        CheckpointError: the header is damaged.
    """

    def __init__(self, path: Path, file: BinaryIO, begin: int = 0) -> None:
        super().__init__(path, self._read_slices)
        self._file = file
        size = path.stat().st_size
        file.seek(begin)
        length = int.from_bytes(file.read(8), "little")
        if length > min(size - begin - 8, MAX_JSON_BYTES):
            raise CheckpointError(f"{path}: is damaged, its header would have {length} bytes")
        try:
            header = json.loads(file.read(length))
            pairs = set(json.loads(header.pop("__metadata__", {}).get(_COMPLEX, "[]")))
            self._entries = {
                name: self._entry(name, entry, begin + 8 + length, size, name in pairs)
                for name, entry in header.items()
            }
            spans = sorted(tuple(entry["data_offsets"]) for entry in header.values())
            if any(end != begin for (_, end), (begin, _) in itertools.pairwise([(0, 0), *spans])):
                raise ValueError("its tensors do not follow each other")
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path}: is damaged, its header is not valid, {one_line(error)}") from None

    @staticmethod
    def _entry(name: str, entry: dict[str, Any], data: int, size: int, is_complex: bool) -> _Entry:
        dtype, shape = DTYPES[known_dtype(entry["dtype"])], tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        if any(type(number) is not int or number < 0 for number in (*shape, begin, end)):
            raise ValueError("a size or offset is not valid")
        if end - begin != math.prod(shape) * dtype.itemsize or data + end > size:
            raise ValueError(f"{end - begin} bytes of shape {shape}")
        if is_complex:
            if dtype not in _OF_PAIRS or shape[-1:] != (2,):
                raise ValueError(f"{entry['dtype']} of shape {shape} are no pairs")
            dtype, shape = _OF_PAIRS[dtype], shape[:-1]
        return _Entry(name, dtype, shape, data + begin)

    @property
    def tensors(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Name to dtype and shape, for all tensors."""
        return {name: (entry.dtype, entry.shape) for name, entry in self._entries.items()}

    def _read_slices(self, name: str, slices: Slices) -> Tensor:
        entry = self._find(name)
        shape = [one.stop - one.start for one in slices]
        found = torch.empty(shape, dtype=entry.dtype)
        self._fill(entry, slices, found)
        return found

    def check(self, name: str, dtype: torch.dtype, shape: Sequence[int]) -> None:
        """See Fetch."""
        entry = self._find(name)
        what = "dtype" if entry.dtype != dtype else "shape" if entry.shape != tuple(shape) else None
        if what is not None:
            raise CheckpointError(f"{self.path}: is damaged, it has another {what} of {name} than the index")

    def fill(self, name: str, slices: Slices, target: Tensor) -> None:
        """See Fetch. Takes no memory besides ``target`` if rows, dtype and device are those of the file."""
        self._fill(self._find(name), slices, target)

    def _find(self, name: str) -> _Entry:
        if name not in self._entries:
            raise CheckpointError(f"{self.path}: is damaged, it does not contain {name}")
        return self._entries[name]

    def _fill(self, entry: _Entry, slices: Slices, target: Tensor) -> None:
        shape = tuple(one.stop - one.start for one in slices)
        if len(slices) != len(entry.shape) or any(one.stop > n for one, n in zip(slices, entry.shape, strict=True)):
            raise CheckpointError(f"{self.path}: is damaged, it has another shape of {entry.name}")
        if tuple(target.shape) != shape:
            target = target.view(shape)
        if target.numel() == 0:
            return
        row = math.prod(entry.shape[1:]) * entry.dtype.itemsize
        begin = entry.begin + (slices[0].start * row if slices else 0)
        if shape[1:] == entry.shape[1:] and entry.dtype == target.dtype and target.is_cpu and target.is_contiguous():
            self._read_bytes(begin, target)
            return
        if not slices:
            scalar = torch.empty((), dtype=entry.dtype)
            self._read_bytes(begin, scalar)
            target.copy_(scalar)
            return
        inner = (slice(None), *slices[1:])
        rows = max(1, _BLOCK_BYTES // row)
        for first in range(0, shape[0], rows):
            count = min(rows, shape[0] - first)
            block = torch.empty(count, *entry.shape[1:], dtype=entry.dtype)
            self._read_bytes(begin + first * row, block)
            target[first : first + count].copy_(block[inner])

    def _read_bytes(self, begin: int, target: Tensor) -> None:
        """Fill a contiguous tensor on the CPU with the bytes that begin at offset ``begin``."""
        room = target.as_strided((target.numel(),), (1,)).view(torch.uint8).numpy().data
        self._file.seek(begin)
        done = 0
        while done < len(room):
            count = self._file.readinto(room[done:])  # type: ignore[attr-defined]
            if not count:
                raise CheckpointError(f"{self.path}: is damaged, it ends too early")
            done += count
