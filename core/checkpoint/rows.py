"""Plain values that differ by process, such as states of random generators: each process has them in its own file.

They are a row of one tensor of bytes, ``values by process``, which the index has as any other tensor. A row is JSON with its
checksum, filled up with spaces. Rank 0 would get 90 MB of them from 4,096 processes, and every process would read as much.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from ..errors import CheckpointError
from .flat_shard import FlatShard
from .load.filling import Source, fill
from .saved_tensor import SavedTensor
from .untrusted import parse_json

KEY = "values by process"
"""Of the tensor, and, in the plain values, of the list of the values' keys."""
DTYPE = "U8"
_DIGITS = 16


def as_row(text: bytes, length: int) -> Tensor:
    """The row, of shape (1, length), of a JSON text of at most ``room(length)`` bytes."""
    padded = text.ljust(room(length))
    return torch.frombuffer(bytearray(_digest(padded) + padded), dtype=torch.uint8).view(1, length)


def room(length: int) -> int:
    """How many bytes of JSON a row of this length may have."""
    return length - _DIGITS


def _digest(text: bytes) -> bytes:
    return xxhash.xxh3_64_hexdigest(text).encode()


class Rows(Sequence[Any]):
    """The values of one key, by process; each is read when it is asked for.

    Args:
        key: of the values.
        count: number of rows.
        read: reads the values of one process, by its number.
    """

    def __init__(self, key: str, count: int, read: Callable[[int], Mapping[str, Any]]) -> None:
        self._key, self._count, self._read = key, count, read

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        numbers = range(self._count)[index]
        if isinstance(numbers, int):
            return self._read(numbers)[self._key]
        return [self._read(number)[self._key] for number in numbers]

    def __iter__(self) -> Iterator[Any]:
        return (self[number] for number in range(self._count))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def __repr__(self) -> str:
        return repr(list(self))


def rows_by_key(path: Path, entry: SavedTensor | None, keys: Any, source: Source) -> dict[str, Rows]:
    """The values of all keys that a checkpoint has by process.

    Args:
        path: of the checkpoint.
        entry: its tensor of this name; None: it has none.
        keys: the list in its plain values; None: it has none.
        source: opens its files.

    Raises:
        CheckpointError: it has one without the other, or they are not valid.
    """
    if entry is None and keys is None:
        return {}
    if entry is None or not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise CheckpointError(f"{path}: is damaged, {KEY} are incomplete")
    if entry.dtype != DTYPE or len(entry.shape) != 2 or not entry.shape[1] > _DIGITS:
        raise CheckpointError(f"{path}: is damaged, {KEY} are {entry.dtype} {entry.shape}")
    last: dict[int, Mapping[str, Any]] = {}

    def read(number: int) -> Mapping[str, Any]:
        if number not in last:
            found = _values_in(path, entry, number, source)
            if not isinstance(found, dict) or not set(keys) <= found.keys():
                raise CheckpointError(f"{path}: is damaged, {KEY} lack some of {', '.join(keys)} in row {number}")
            last.clear()
            last[number] = found
        return last[number]

    return {key: Rows(key, entry.shape[0], read) for key in keys}


def _values_in(path: Path, entry: SavedTensor, number: int, source: Source) -> Any:
    count, length = entry.shape
    row = FlatShard(torch.empty(length, dtype=torch.uint8), (count, length), number * length)
    try:
        fill({KEY: row}, {KEY: entry}, source)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read, {error.strerror or error}") from None
    content = bytes(row.to_local().numpy())
    if _digest(content[_DIGITS:]) != content[:_DIGITS]:
        raise CheckpointError(f"{path}: is damaged, row {number} of {KEY} has another checksum")
    return parse_json(path, content[_DIGITS:])
