"""Read the index of a directory of torch.distributed.checkpoint without unpickling: what it has, and in which bytes.

The index is a pickle of a few dataclasses. They are described here by placeholders; nothing that it names is imported.

Source: torch 2.15, ``torch/distributed/checkpoint/metadata.py`` and ``filesystem.py``; the same since torch 2.0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...errors import CheckpointError
from ..untrusted import check_shape, is_name_in_folder, one_line
from .pickles import MAX_BYTES, ForbiddenNameError, Inert, Named, Record, describe

INDEX = ".metadata"
_MAX_NAME = 4096
_MAX_CHUNKS = 10**7
_DAMAGE = (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, EOFError, MemoryError, RecursionError)

Offsets = tuple[int, ...]


@dataclass(frozen=True)
class Item:
    """The bytes of one chunk.

    Attributes:
        file: name of the file in the folder.
        offset: of its first byte in the file.
        length: number of bytes.
        transforms: what was done with the bytes, such as compression; empty if nothing was.
    """

    file: str
    offset: int
    length: int
    transforms: tuple[str, ...]


@dataclass(frozen=True)
class IndexedTensor:
    """A tensor of the index.

    Attributes:
        dtype: None if this version of torch has no such dtype.
        dtype_name: as the index has it, for messages.
        shape: of the whole tensor.
        chunks: offsets and sizes of each chunk, with its bytes.
    """

    dtype: torch.dtype | None
    dtype_name: str
    shape: tuple[int, ...]
    chunks: tuple[tuple[Offsets, tuple[int, ...], Item], ...]


@dataclass(frozen=True)
class Index:
    """What a folder has.

    Attributes:
        tensors: by name; names of nested dicts are joined by dots.
        others: names of what is no tensor and would have to be unpickled.
    """

    tensors: Mapping[str, IndexedTensor]
    others: tuple[str, ...]


def read_index(path: Path) -> Index:
    """Read an index.

    Raises:
        CheckpointError: it is damaged, names what no index has, or is of an unknown version.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise CheckpointError(f"{path}: has {path.stat().st_size} bytes, more than {MAX_BYTES} are not read")
        with path.open("rb") as file:
            content = describe(file, _known, _no_storage)
        return _index_of(path, content)
    except ForbiddenNameError as error:
        raise CheckpointError(
            f"{path}: cannot be read, it holds {one_line(error)}, which no index of torch.distributed.checkpoint has, and "
            "loading that could execute code"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read, {error.strerror or error}") from None
    except _DAMAGE as error:
        raise CheckpointError(
            f"{path}: is damaged, or no index of torch.distributed.checkpoint, {one_line(error) or type(error).__name__}"
        ) from None


def _index_of(path: Path, content: Any) -> Index:
    if not isinstance(content, Record) or not content.name.endswith(".Metadata"):
        raise ValueError("it holds no Metadata")
    fields = _fields(content)
    version = fields.get("version")
    if version is not None and not str(version).startswith("1."):
        raise CheckpointError(f"{path}: is of version {one_line(version)}, and version 1 is known; update flextrain")
    items = _items(path, fields["storage_data"])
    tensors, others = {}, []
    for name, described in fields["state_dict_metadata"].items():
        if not isinstance(name, str) or len(name) > _MAX_NAME:
            raise ValueError("a name that is no text")
        if not isinstance(described, Record):
            raise TypeError(f"{one_line(name)} is not described")
        if described.name.endswith(".TensorStorageMetadata"):
            tensors[name] = _tensor(path, name, _fields(described), items)
        else:
            others.append(name)
    return Index(tensors, tuple(others))


def _tensor(
    path: Path, name: str, fields: Mapping[str, Any], items: Mapping[tuple[str, Offsets | None], Item]
) -> IndexedTensor:
    shape = _sizes(fields["size"])
    check_shape(shape)
    dtype, dtype_name = _dtype(fields["properties"])
    chunks: dict[tuple[Offsets, Offsets], Item] = {}
    for chunk in fields["chunks"]:
        own = _fields(chunk)
        box = _sizes(own["offsets"]), _sizes(own["sizes"])
        if not all(len(part) == len(shape) for part in box):
            raise ValueError(f"a chunk of {one_line(name)} has another number of dimensions")
        if 0 in box[1] and 0 not in shape:  # a process without a part
            continue
        item = items.get((name, box[0]))
        if item is None and len(fields["chunks"]) == 1:
            item = items.get((name, None))
        if item is None:
            raise CheckpointError(f"{path}: says nothing of where {one_line(name)} at {list(box[0])} is")
        chunks[box] = item
    return IndexedTensor(dtype, dtype_name, shape, tuple((*box, item) for box, item in chunks.items()))


def _dtype(properties: Any) -> tuple[torch.dtype | None, str]:
    """The dtype in a TensorProperties, whose state is a tuple that begins with it, or a dict."""
    state = properties.state
    named = state["dtype"] if isinstance(state, Mapping) else state[0]
    if not isinstance(named, Named) or not named.name.startswith("torch."):
        raise ValueError("a dtype that is none")
    found = getattr(torch, named.name.removeprefix("torch."), None)
    return (found if isinstance(found, torch.dtype) else None), named.name.removeprefix("torch.")


def _items(path: Path, given: Any) -> dict[tuple[str, Offsets | None], Item]:
    """Where the chunks are: by name and offsets; those of what is no tensor have no offsets."""
    if not isinstance(given, dict):
        raise TypeError("it does not say which bytes belong to what")
    if len(given) > _MAX_CHUNKS:
        raise CheckpointError(f"{path}: names {len(given)} chunks, more than {_MAX_CHUNKS} are not read")
    found: dict[tuple[str, Offsets | None], Item] = {}
    for key, value in given.items():
        index, info = _fields(key), _fields(value)
        name, offsets = index["fqn"], index.get("offset")
        file, begin, length = info["relative_path"], info["offset"], info["length"]
        if not isinstance(name, str) or not isinstance(file, str):
            raise TypeError("a name that is no text")
        if not is_name_in_folder(file):
            raise CheckpointError(f"{path}: names {file[:200]!r}, which is not a file in its folder")
        if any(type(number) is not int or not 0 <= number < 2**62 for number in (begin, length)):
            raise ValueError("a number of bytes that is none")
        transforms = tuple(one_line(each) for each in info.get("transform_descriptors") or ())
        found[name, None if offsets is None else _sizes(offsets)] = Item(file, begin, length, transforms)
    return found


def _fields(record: Any) -> Mapping[str, Any]:
    """The attributes of a dataclass; one with slots has (None, attributes) as its state."""
    state = record.state
    if isinstance(state, tuple) and len(state) == 2 and state[0] is None:
        state = state[1]
    if not isinstance(state, Mapping):
        raise TypeError(f"{record.name.rpartition('.')[2]} without attributes")
    return state


def _sizes(given: Any) -> tuple[int, ...]:
    if not isinstance(given, Sequence) or any(type(size) is not int or not 0 <= size < 2**62 for size in given):
        raise ValueError("a size that is none")
    return tuple(given)


def _no_storage(_: Any) -> Any:
    raise ValueError("a tensor where none may be")


# The classes of torch's index, of all versions; what else a planner of its own leaves there is not known, and refused.
_RECORDS = re.compile(r"torch\.distributed\.(checkpoint|_shard)\.[\w.]+")
_IGNORED = re.compile(r"torch\.serialization\._get_layout|pathlib\.(_local\.)?(Pure)?(Posix|Windows)?Path")
_DTYPES = re.compile(r"torch\.(?!device$)\w+")
_MADE: Mapping[str, Callable[..., Any]] = {
    "torch.Size": lambda items=(): tuple(items),
    "collections.OrderedDict": lambda items=(): {},
    "builtins.set": Inert,
}


def _known(name: str) -> Callable[..., Any] | None:
    if name in _MADE:
        return _MADE[name]
    if _RECORDS.fullmatch(name):
        return lambda *arguments: Record(name, arguments)
    # Only their names are read, and nothing is called.
    return Inert if _IGNORED.fullmatch(name) or _DTYPES.fullmatch(name) else None
