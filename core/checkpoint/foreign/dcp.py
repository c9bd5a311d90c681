"""Read a directory of torch.distributed.checkpoint, as plain scripts, torchtitan, Lightning and Accelerate write them.

Each process reads only the chunks that it needs, from mapped files. torch's own reader unpickles the index and whatever
is no tensor, which may execute any code; here the pickles are only described, and what is no tensor is not read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

import torch
from torch import Tensor

from ...errors import CheckpointError
from ...stored_dtypes import DTYPE_NAMES
from ..load.checkpoint import Checkpoint
from ..load.partial_read import Fetch
from ..safetensors_file import SafetensorsFile
from ..saved_tensor import StoredChunk, TensorEntry
from ..untrusted import one_line, sibling
from .dcp_index import INDEX, Index, IndexedTensor, Item, read_index
from .stored_tensors import MODEL, entry, label
from .torch_files import StoredTensor, TorchFile

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
