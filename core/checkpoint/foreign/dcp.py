"""Read a directory of torch.distributed.checkpoint, as plain scripts, torchtitan, Lightning and Accelerate write them.

Each process reads only the chunks that it needs, from mapped files. torch's own reader unpickles the index and whatever
is no tensor, which may execute any code; here the pickles are only described, and what is no tensor is not read.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor

from ...base.errors import CheckpointError
from ...base.tensors import DTYPE_NAMES
from ..load import Checkpoint
from ..manifest import StoredChunk, TensorEntry
from ..safetensors_file import Fetch, SafetensorsFile
from ..untrusted import check_shape, is_name_in_folder, one_line, sibling
from . import weights_file as hugging_face
from .torch_files import DAMAGE, MAX_BYTES, ForbiddenNameError, Inert, Named, Record, StoredTensor, TorchFile, describe
from .weights_file import MODEL, entry, label

# Read the index of a directory of torch.distributed.checkpoint without unpickling: what it has, and in which bytes.
#
# The index is a pickle of a few dataclasses. They are described here by placeholders; nothing that it names is
# imported.
#
# Source: torch 2.15, ``torch/distributed/checkpoint/metadata.py`` and ``filesystem.py``; the same since torch 2.0.


INDEX = ".metadata"
_MAX_NAME = 4096
_MAX_CHUNKS = 10**7

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
        return _index_of(path, describe(io.BytesIO(path.read_bytes()), _known, _no_storage))
    except ForbiddenNameError as error:
        raise CheckpointError(
            f"{path}: cannot be read, it holds {one_line(error)}, which no index of torch.distributed.checkpoint has, and "
            "loading that could execute code"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read, {error.strerror or error}") from None
    except DAMAGE as error:
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


# Some trainers have the index in a subfolder.
_SUBFOLDERS = ("checkpoint", "model")
_OF_LIGHTNING = "meta.pt"


def find(folder: Path) -> Path | None:
    """The directory of an index: ``folder``, or a subfolder in which trainers put it; None if there is none.

    Raises:
        CheckpointError: the folder has several checkpoints, or one that cannot be read.
    """
    if (folder / INDEX).is_file():
        return folder
    for name in _SUBFOLDERS:
        if (folder / name / INDEX).is_file():
            return folder / name
    if any(folder.glob(f"__*{INDEX}")):
        raise CheckpointError(
            f"{folder}: has an index for each process (__0{INDEX}), because it was saved with "
            "use_collectives=False, and only a common one is read; save it with use_collectives=True"
        )
    several = sorted(path.parent.name for path in folder.glob(f"*/{INDEX}"))
    if several:
        raise CheckpointError(f"{folder}: holds other checkpoints, give one of them: {', '.join(several[:8])}")
    if any(folder.glob("*.distcp")):
        raise CheckpointError(
            f"{folder}: has files of torch.distributed.checkpoint but no {INDEX}, which is written last: the save did not "
            "end, or the file was not copied"
        )
    return None


def is_part(path: Path) -> bool:
    """Whether a file is one of those in such a directory."""
    return path.name.endswith((INDEX, ".distcp"))


def open_directory(folder: Path) -> Checkpoint:
    """Open the tensors in a directory from ``find``, under the keys ``model.<name>``, whatever else the name begins with.

    Raises:
        CheckpointError: the index is damaged, or a file is missing.
    """
    index = read_index(folder / INDEX)
    reader = _Reader(folder, index)
    origin = "Lightning" if (folder / _OF_LIGHTNING).is_file() else "torch.distributed.checkpoint"
    return Checkpoint(
        folder, reader.entries, {}, reader.source, origin=origin, not_read=(*index.others, *reader.unknown)
    )


class _Reader:
    def __init__(self, folder: Path, index: Index) -> None:
        self.folder = folder
        self.files: dict[str, int] = {}
        self.items: dict[str, dict[str, Item]] = {}
        self.entries: dict[str, TensorEntry] = {}
        self.unknown: list[str] = []
        for name, tensor in index.tensors.items():
            self._add(name, tensor)
        self.paths = {label(number): sibling(folder / INDEX, file) for file, number in self.files.items()}

    def _add(self, name: str, tensor: IndexedTensor) -> None:
        if tensor.dtype not in DTYPE_NAMES:
            self.unknown.append(f"{name} ({tensor.dtype_name} is not read)")
            return
        chunks = []
        for offsets, sizes, item in tensor.chunks:
            if item.transforms:
                raise CheckpointError(
                    f"{self.folder}: {one_line(name)} is stored with {', '.join(item.transforms)}, and only tensors as they "
                    "are can be read; save it without extensions"
                )
            file = label(self.files.setdefault(item.file, len(self.files)))
            own = f"{name}@{','.join(map(str, offsets))}"
            self.items.setdefault(file, {})[own] = item
            chunks.append(StoredChunk(offsets=offsets, shape=sizes, file=file, name=own))
        self.entries[MODEL + name] = entry(self.folder, name, DTYPE_NAMES[tensor.dtype], tensor.shape, chunks)

    @contextmanager
    def source(self, file: str) -> Iterator[Fetch]:
        path = self.paths[file]
        with path.open("rb", buffering=0) as opened:
            yield _Items(path, self.items[file], cast(BinaryIO, opened))


class _Items(Fetch):
    """Reads chunks from one file: each is a file of ``torch.save`` for itself, or all are a file of safetensors."""

    def __init__(self, path: Path, items: Mapping[str, Item], file: BinaryIO) -> None:
        super().__init__(path, lambda name, slices: self._tensor(name)[slices])
        self._items, self._file = items, file
        self._safetensors: dict[int, SafetensorsFile] = {}
        self._last: tuple[str, Tensor] | None = None

    def check(self, name: str, dtype: torch.dtype, shape: Sequence[int]) -> None:
        """See Fetch."""
        tensor = self._tensor(name)
        what = "dtype" if tensor.dtype != dtype else "shape" if tuple(tensor.shape) != tuple(shape) else None
        if what is not None:
            raise CheckpointError(f"{self.path}: is damaged, it has another {what} of {one_line(name)} than the index")

    def _tensor(self, name: str) -> Tensor:
        if self._last is None or self._last[0] != name:
            item = self._items[name]
            self._file.seek(item.offset)
            is_safetensors = self._file.read(9)[8:] == b"{"
            self._last = name, self._of_safetensors(name, item) if is_safetensors else self._of_torch(name, item)
        return self._last[1]

    def _of_torch(self, name: str, item: Item) -> Tensor:
        size = self.path.stat().st_size
        if item.offset + item.length > size:
            raise CheckpointError(
                f"{self.path}: is damaged, it has {size} bytes, and {one_line(name)} ends at {item.offset + item.length}"
            )
        file = TorchFile(self.path, (item.offset, item.length))
        stored = file.content
        if not isinstance(stored, StoredTensor) or stored.kind != "strided":
            kind = f"a {stored.kind} tensor" if isinstance(stored, StoredTensor) else type(stored).__name__
            raise CheckpointError(f"{self.path}: has {kind} for {one_line(name)}, and only dense tensors can be read")
        return file.map()(stored)

    def _of_safetensors(self, name: str, item: Item) -> Tensor:
        """A tensor of a file that was written with ``SerializationFormat.SAFETENSORS``: all items have its beginning."""
        if item.offset not in self._safetensors:
            self._safetensors[item.offset] = SafetensorsFile(self.path, self._file, item.offset)
        file, key = self._safetensors[item.offset], name.rpartition("@")[0]
        _, shape = file.tensors.get(key, (None, ()))
        return file(key, tuple(slice(0, size) for size in shape))


# Find the weights in a folder that Accelerate's ``save_state`` has written.
#
# Source: accelerate 1.15, ``checkpointing.py`` and ``utils/fsdp_utils.py``; DeepSpeed's own files there are not its
# matter.


_SHARDED, _WHOLE, _OF_PROCESSES = "pytorch_model_fsdp_0", "pytorch_model_fsdp.bin", "pytorch_model_fsdp*_rank*.bin"
_BESIDE = ("*.bin", "*.pkl", "*.pt", "model_*.safetensors", "optimizer_*", "pytorch_model_fsdp_*")


def find_accelerate(folder: Path) -> tuple[Path, list[str]] | None:
    """The file or folder of the first model's weights, and the names of what is beside it; None if it is no such folder.

    Raises:
        CheckpointError: each process has written a part that only the same number of processes can use.
    """
    if not any(folder.glob("random_states_*.pkl")) and not any(folder.glob("pytorch_model_fsdp*")):
        return None
    if (folder / _SHARDED).is_dir():
        found: Path | None = find(folder / _SHARDED)
    elif (folder / _WHOLE).is_file():
        found = folder / _WHOLE
    elif parts := sorted(path.name for path in folder.glob(_OF_PROCESSES)):
        raise CheckpointError(
            f"{folder}: has a file for each process ({parts[0]}), which does not say which part of a weight it holds; save "
            'with fsdp_state_dict_type "SHARDED_STATE_DICT" and use_dcp=True, or "FULL_STATE_DICT"'
        )
    else:
        found = hugging_face.find(folder)
    if found is None:
        return None
    own = {found.name, *(path.name for path in folder.glob("pytorch_model-*.bin"))}
    beside = {path.name for pattern in _BESIDE for path in folder.glob(pattern)}
    return found, sorted(beside - own)
