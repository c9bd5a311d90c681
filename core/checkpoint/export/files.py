"""Write ``torch.save`` files tensor by tensor, and replace files atomically."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol

import torch
from torch import Tensor

from ...base.errors import CheckpointError
from ...base.json_values import taken_from, unpack
from ...model.module_state import EXTRA, torch_key
from ...torch_compat.torch_private import REBUILD_TENSOR, REBUILD_TENSOR_OF_DTYPE
from ..directory import sync_directory
from ..folders import FolderLock, OccupiedError, remove_if_empty
from ..load import Checkpoint
from ..safetensors_file import bytes_of

# The folder that an export writes: by one export at a time, and complete or as it was before.


_STAGED = ".flextrain_export"
# Not that of a run, which may export to its own work_dir.
_LOCK = ".flextrain_export.lock"


_FILES = (".safetensors", ".pth", ".pt", ".bin")


def local_target(given: str | os.PathLike[str]) -> Path:
    """Return what an export shall write as a path.

    Raises:
        CheckpointError: it is a URL, or empty.
    """
    if "://" in os.fspath(given):
        raise CheckpointError(f"{given}: is a URL, and exports write to local files; give a path, and copy it there")
    if not os.fspath(given):
        raise CheckpointError('"": is not allowed, give the name of what is to be written')
    return Path(given)


def local_folder(given: str | os.PathLike[str]) -> Path:
    """Return the folder that an export shall write.

    Raises:
        CheckpointError: it is a URL, or empty, or has the name of a file with weights.
    """
    path = local_target(given)
    if path.suffix.lower() in _FILES and not path.exists():
        raise CheckpointError(
            f"{path}: has the name of a file, and this export writes a folder; leave out {path.suffix}"
        )
    return path


def make(folder: Path, target: Path) -> None:
    """Make a folder and those around it, for ``target``.

    Raises:
        CheckpointError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        file = next(path for path in (folder, *folder.parents) if path.is_file())
        raise CheckpointError(f"{target}: could not be written, {file} is a file") from None
    except OSError as error:
        raise CheckpointError(f"{target}: could not be written, {error.strerror or error}") from error


def check_free(folder: Path, patterns: Iterable[str], allowed: str = "a folder") -> None:
    """Check that a folder has no file of such a name, or is not there yet.

    What an export has left that was killed does not count.

    Raises:
        CheckpointError: it has one, or it is no folder.
    """
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder}: is a file, give {allowed}")
    for pattern in patterns:
        for file in sorted(folder.glob(pattern)):
            if file.name not in (_STAGED, _LOCK):
                raise CheckpointError(f"{file}: is there already, give another folder")


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Context in which no other export writes to a folder, which is made; if it is empty at the end, it is removed.

    Raises:
        CheckpointError: another export writes to it, or it cannot be made.
    """
    is_new = not folder.exists()
    make(folder, folder)
    try:
        lock = FolderLock(folder, _LOCK)
    except OccupiedError as error:
        raise CheckpointError(f"{folder}: is being written by {error}, give another folder") from None
    except OSError as error:
        raise CheckpointError(f"{folder}: could not be written, {error.strerror or error}") from error
    with ExitStack() as stack:
        if is_new:
            stack.callback(remove_if_empty, folder)
        stack.callback(lock.release)
        yield


@contextmanager
def filled(folder: Path, last: str, patterns: Iterable[str]) -> Iterator[Path]:
    """Context with an empty folder, whose files are moved to ``folder`` at its end; an error leaves ``folder`` as it was.

    Args:
        folder: a folder that is ``claimed``.
        last: the name of the file that is moved when all others are there.
        patterns: see ``check_free``; another export may have been faster.

    Raises:
        CheckpointError: there is such a file, or the disk is full, or fails.
    """
    check_free(folder, patterns)
    staged = folder / _STAGED
    try:
        shutil.rmtree(staged, ignore_errors=True)  # of an export that was killed
        staged.mkdir()
        yield staged
        for file in sorted(staged.iterdir(), key=lambda file: (file.name == last, file.name)):
            if file.is_dir():
                shutil.copytree(file, folder / file.name, dirs_exist_ok=True)
            else:
                file.replace(folder / file.name)
        sync_directory(folder)
    except OSError as error:
        raise CheckpointError(f"{folder}: could not be written, {error.strerror or error}") from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)


# Find the extra state of modules in a checkpoint for an export.


@dataclass(frozen=True)
class ExportedTensor:
    """A tensor to export: its ``key`` in the checkpoint, its ``name`` in the exported file."""

    name: str
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


@dataclass(frozen=True)
class ExtraState:
    """The extra state of one module.

    Attributes:
        name: torch's key for it, ``layer._extra_state``.
        value: the encoded value of the checkpoint, see ``core.module_state``.
        tensors: the tensors that the value refers to by index.
    """

    name: str
    value: Any
    tensors: tuple[ExportedTensor, ...]


def extra_states(source: Checkpoint, tied: bool) -> list[ExtraState]:
    """The extra state of all modules; ``tied``: that of a module with several names under each name.

    Raises:
        CheckpointError: the extra state is damaged.
    """
    aliases = source.values.get("aliases", {})
    found = []
    for key, value in source.values.items():
        if not key.startswith(EXTRA):
            continue
        tensors: dict[int, ExportedTensor] = {}
        try:
            unpack(value, taken_from(partial(_noted, tensors, source, key)))
            ordered = tuple(tensors[i] for i in range(len(tensors)))
        except (LookupError, TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{source.path}: {key} is damaged, {error}") from None
        name = torch_key(key.removeprefix(EXTRA))
        names = [name]
        if tied and isinstance(aliases, Mapping):
            names += [alias for alias, first in aliases.items() if first == name]
        found += [ExtraState(each, value, ordered) for each in names]
    return found


def _noted(tensors: dict[int, ExportedTensor], source: Checkpoint, key: str, number: int) -> ExportedTensor:
    return tensors.setdefault(number, _tensor(source, f"{key}/{number}"))


def _tensor(source: Checkpoint, key: str) -> ExportedTensor:
    info = source.tensors[key]
    return ExportedTensor(key, key, info.shape, info.dtype)


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
