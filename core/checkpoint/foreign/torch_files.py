"""Read files of ``torch.save`` without unpickling: their content, and their tensors as views of the mapped file."""

from __future__ import annotations

import math
import mmap
import re
import struct
import sys
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import CheckpointError
from .mapped_span import Mapped, MappedSpan
from .pickles import ForbiddenNameError, Inert, Named, describe, pairs

# The first two values in a file of the format before torch 1.6.
_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
# A tensor with stride 0 (expanded) may be larger than its storage, up to this size.
_EXPANDED_BYTES = 16 * 2**20
_MAX_DIMENSIONS = 64


@dataclass(frozen=True)
class Storage:
    """A range of elements of a storage in a file.

    Attributes:
        key: name of the storage in the file.
        dtype: dtype of the elements; uint8 for an untyped storage.
        offset: begin of the range in the storage, in elements.
        numel: number of elements.
    """

    key: str
    dtype: torch.dtype
    offset: int
    numel: int

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class StoredTensor:
    """Description of a tensor in a file: a view of a storage.

    Attributes:
        storage: the storage with its elements.
        dtype: dtype of the elements.
        offset: offset of the first element in the storage, in elements.
        shape: sizes of the dimensions.
        stride: strides, in elements.
        kind: "strided", or another kind of tensor; only strided ones can be read.
    """

    storage: Storage
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    kind: str = "strided"

    @property
    def nbytes(self) -> int:
        """Size of the tensor in memory, in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def is_inside(self, limit: int) -> bool:
        """Whether it is inside its storage, and takes at most the larger of the storage's size and ``limit`` bytes."""
        numbers = (self.offset, *self.shape, *self.stride)
        if len(self.shape) != len(self.stride) or len(self.shape) > _MAX_DIMENSIONS:
            return False
        if any(type(number) is not int or not 0 <= number < 2**62 for number in numbers):
            return False
        if 0 in self.shape:
            return math.prod(size for size in self.shape if size) < 2**62
        last = self.offset + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        held = self.storage.nbytes // self.dtype.itemsize
        return last < held and self.nbytes <= max(self.storage.nbytes, limit)


class TorchFile:
    """A file of ``torch.save``. No stored code is executed, and no tensor is read before it is needed.

    Args:
        path: the file.
        span: offset and length, in bytes, of the part of a file that was written so; None: the whole file.

    Attributes:
        content: dicts, lists, plain values and ``StoredTensor``.

    Raises:
        CheckpointError: the file is damaged, or has objects that are neither tensors nor plain values.
    """

    def __init__(self, path: Path, span: tuple[int, int] | None = None) -> None:
        self.path = path
        self._file_size = path.stat().st_size
        self._start, self.size = span or (0, self._file_size)
        self._begins: dict[str, int] = {}
        try:
            with path.open("rb") as file:
                whole = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                with whole, whole if span is None else MappedSpan(whole, *span) as data:
                    self.content = self._read_zip(data) if data[:2] == b"PK" else self._read_legacy(data)
        except ForbiddenNameError as error:
            raise CheckpointError(
                f"{path}: cannot be read as weights, it holds {error}, and loading that would execute code; "
                "save the state dict alone"
            ) from None
        except CheckpointError as error:
            raise CheckpointError(f"{path}: cannot be read as weights, {error}") from None
        except _DAMAGE:
            raise CheckpointError(
                f"{path}: cannot be read as weights, it is damaged, or was not written by torch.save"
            ) from None

    def map(self) -> Callable[[StoredTensor], Tensor]:
        """Map the file; return a function that gives a tensor as a view of it. Using the tensor reads the file."""
        data = torch.from_file(str(self.path), shared=False, size=self._file_size, dtype=torch.uint8)

        def tensor(stored: StoredTensor) -> Tensor:
            storage = stored.storage
            begin = self._start + self._begins[storage.key] + storage.offset * storage.dtype.itemsize
            part = data[begin : begin + storage.nbytes]
            if begin % stored.dtype.itemsize:  # the old format does not align tensors
                part = part.clone()
            flat = part[: part.numel() // stored.dtype.itemsize * stored.dtype.itemsize].view(stored.dtype)
            return flat.as_strided(stored.shape, stored.stride, flat.storage_offset() + stored.offset)

        return tensor

    # The formats

    def _read_zip(self, data: Mapped) -> Any:
        # A mapped file lacks what zipfile asks of one before Python 3.13.
        view = data if isinstance(data, MappedSpan) else MappedSpan(data, 0, len(data))
        with zipfile.ZipFile(view) as archive:
            records = {record.filename: record for record in archive.infolist()}
        root = next(iter(records)).partition("/")[0]
        if f"{root}/constants.pkl" in records:
            raise CheckpointError("it is a TorchScript archive, which is code; save the state dict alone")
        # torch never compresses, and a small compressed record could expand to any size.
        packed = [name for name, record in records.items() if record.compress_type != zipfile.ZIP_STORED]
        if packed:
            raise CheckpointError(f"{packed[0]} in it is compressed, which torch.save does not do")
        if byteorder := records.get(f"{root}/byteorder"):
            _check_byteorder(_record(data, byteorder))
        sizes = {}
        for name, record in records.items():
            if name.startswith(f"{root}/data/"):
                key = name.removeprefix(f"{root}/data/")
                self._begins[key], sizes[key] = _begin(data, record), record.file_size
        data.seek(_begin(data, records[f"{root}/data.pkl"]))
        return describe(data, self._known, lambda given: self._storage(given, sizes))  # type: ignore[arg-type]

    def _read_legacy(self, data: Mapped) -> Any:
        described = [self._without_storages(data) for _ in range(3)]
        if described[:2] != [_MAGIC, _PROTOCOL]:
            raise ValueError("no file of torch.save")
        if isinstance(described[2], dict):
            _check_byteorder(b"little" if described[2].get("little_endian", True) else b"big")
        storages: dict[str, Storage] = {}

        def storage(given: Any) -> Storage:
            found = _storage_of(given)
            root = Storage(found.key, found.dtype, 0, int(given[4]))
            if storages.setdefault(found.key, root).nbytes != root.nbytes:
                raise ValueError("a storage of two sizes")
            return found

        content = describe(data, self._known, storage)  # type: ignore[arg-type]
        for key in self._without_storages(data):
            (numel,) = struct.unpack("<q", data.read(8))
            begin, nbytes = data.tell(), storages[str(key)].nbytes
            if numel != storages[str(key)].numel or begin + nbytes > self.size:
                raise CheckpointError(f"a tensor of {nbytes} bytes exceeds the {self.size} bytes of the file")
            self._begins[str(key)] = begin
            data.seek(begin + nbytes)
        if storages.keys() - self._begins.keys():
            raise ValueError("a storage that is not there")
        return content

    def _without_storages(self, data: Mapped) -> Any:
        return describe(data, self._known, _no_storage)  # type: ignore[arg-type]

    def _storage(self, given: Any, sizes: Mapping[str, int]) -> Storage:
        found = _storage_of(given)
        if found.key not in sizes or found.nbytes > sizes[found.key]:
            raise CheckpointError(f"a tensor of {found.nbytes} bytes exceeds the {self.size} bytes of the file")
        return found

    # Functions and classes that a pickle of tensors names

    def _known(self, name: str) -> Callable[..., Any] | None:
        return _MADE.get(name) or (self._tensor if name in _TENSORS else None) or (Inert if _inert(name) else None)

    def _tensor(self, storage: Any, offset: Any, shape: Any, stride: Any, *rest: Any) -> StoredTensor:
        """Called instead of torch's functions that make a tensor of a storage; version 3 also passes the dtype."""
        named = (_DTYPES[part.name] for part in rest if isinstance(part, Named) and part.name in _DTYPES)
        dtype = next(named, storage.dtype)
        stored = StoredTensor(storage, dtype, offset, tuple(shape), tuple(stride))
        if not stored.is_inside(max(self.size, _EXPANDED_BYTES)):
            raise CheckpointError(f"a tensor of shape {list(shape)[:8]} exceeds the {self.size} bytes of the file")
        return stored


_DAMAGE = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    EOFError,
    MemoryError,
    RecursionError,
    NotImplementedError,
    struct.error,
    zipfile.BadZipFile,
)


def _check_byteorder(written: bytes) -> None:
    if written != sys.byteorder.encode():
        raise CheckpointError("it was written on a machine with another byte order")


def _begin(data: Mapped, record: zipfile.ZipInfo) -> int:
    """Offset of a record's content in the file."""
    local = data[record.header_offset : record.header_offset + 30]
    name, extra = struct.unpack("<HH", local[26:30])
    begin = record.header_offset + 30 + int(name) + int(extra)
    if begin + record.file_size > len(data):
        raise ValueError("a record that is not all there")
    return begin


def _record(data: Mapped, record: zipfile.ZipInfo) -> bytes:
    begin = _begin(data, record)
    return data[begin : begin + min(record.file_size, 16)]


def _no_storage(_: Any) -> Any:
    raise ValueError("a storage where none may be")


def _storage_of(given: Any) -> Storage:
    """Parse torch's persistent id: ("storage", type, key, device, numel[, (view's key, offset, numel) or None])."""
    word, kind, key, _, numel, *view = given
    if word != "storage" or type(numel) is not int or not 0 <= numel < 2**62:
        raise ValueError("a persistent id that is no storage")
    offset = 0
    if view and view[0] is not None:
        _, offset, length = view[0]
        if any(type(n) is not int or n < 0 for n in (offset, length)) or offset + length > numel:
            raise ValueError("a view outside of its storage")
        numel = length
    return Storage(str(key), _DTYPES_OF_STORAGES[kind.name], offset, numel)


def _subclass(function: Any, kind: Any, arguments: Any, state: Any) -> Any:
    """Called instead of torch's function that makes tensors with attributes and subclasses of tensors."""
    return function.make(*arguments)


def _attribute(owner: Any, name: Any) -> Inert:
    """Called instead of getattr, which could reach any object of the process; MMEngine's HistoryBuffer needs it."""
    if not isinstance(owner, Inert) and getattr(owner, "name", None) != _MMENGINE_HISTORY:
        raise ForbiddenNameError(f"getattr of {name}")
    return Inert()


def _other(kind: str) -> Callable[..., StoredTensor]:
    def make(*_: object) -> StoredTensor:
        return StoredTensor(Storage("", torch.uint8, 0, 0), torch.uint8, 0, (), (), kind)

    return make


_STORAGES = {
    "Double": torch.float64,
    "Float": torch.float32,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
    "ComplexFloat": torch.complex64,
    "ComplexDouble": torch.complex128,
}
_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_TENSORS = ("torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3")


_DTYPES_OF_STORAGES = {
    **{f"torch.{name}Storage": dtype for name, dtype in _STORAGES.items()},
    **{f"torch.cuda.{name}Storage": dtype for name, dtype in _STORAGES.items()},
    "torch.storage.UntypedStorage": torch.uint8,
}
_MMENGINE_HISTORY = "mmengine.logging.history_buffer.HistoryBuffer"
_MADE: Mapping[str, Callable[..., Any]] = {
    # A pickle only names these, and does not call them.
    **dict.fromkeys([*_DTYPES_OF_STORAGES, *_DTYPES], Inert),
    _MMENGINE_HISTORY: Inert,
    "builtins.getattr": _attribute,
    "collections.OrderedDict": lambda items=(): pairs(items),
    "collections.defaultdict": lambda *_: {},
    "torch.Size": lambda items=(): tuple(items),
    "torch.nn.parameter.Parameter": lambda data, *_: data,
    "torch._utils._rebuild_parameter": lambda data, *_: data,
    "torch._utils._rebuild_parameter_with_state": lambda data, *_: data,
    "torch._tensor._rebuild_from_type_v2": _subclass,
    "torch._utils._rebuild_sparse_tensor": _other("sparse"),
    "torch._utils._rebuild_qtensor": _other("quantised"),
    "torch._utils._rebuild_meta_tensor_no_storage": _other("meta"),
    "torch._utils._rebuild_wrapper_subclass": _other("subclassed"),
}
# Other objects in files of weights, which are ignored: DeepSpeed's loss scalers, NumPy's numbers, argparse's arguments.
_INERT = (
    r"builtins\.(bool|bytearray|bytes|complex|dict|float|frozenset|int|list|long|range|set|slice|str|tuple)",
    r"argparse\.Namespace|collections\.(Counter|deque)",
    r"_codecs\.encode|datetime\.\w+|deepspeed\.[\w.]+",
    r"numpy\.(dtype|ndarray|_?core\.multiarray\.(_reconstruct|scalar))|pathlib\.(_local\.)?(Pure)?(Posix|Windows)?Path",
    r"torch\.(Tensor|device|nn\.parameter\.Buffer|serialization\._get_layout|distributed\.tensor\.[\w.]+)",
    r"torch\.distributed\.device_mesh\.DeviceMesh",
    # What Lightning's files have beside the weights: hyper parameters, states of callbacks.
    r"(lightning|lightning_fabric|pytorch_lightning|torchmetrics|omegaconf|torch\.optim|typing)\.[\w.]+",
)
_INERT_NAMES = re.compile("|".join(_INERT))


def _inert(name: str) -> bool:
    return _INERT_NAMES.fullmatch(name) is not None
