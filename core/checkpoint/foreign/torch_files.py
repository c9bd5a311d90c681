"""Read files of ``torch.save`` without unpickling: their content, and their tensors as views of the mapped file."""

from __future__ import annotations

import math
import mmap
import pickle
import re
import struct
import sys
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from ...base.errors import CheckpointError

# Parse a pickle safely: read its content without importing or executing anything that it names.
#
# A pickle is a program that may call anything that can be imported. Python's own machine follows its instructions here,
# but it imports nothing and calls only the functions that it was given. It builds dicts, lists and tuples, and every
# class or function that the program names must be known in advance.
#
# Two alternatives were tried with tests/checkpoint/test_sources.py and test_attacks.py, and have these problems:
#
# - ``torch.load(weights_only=True, mmap=True)`` with placeholders as safe globals cannot read pickles of protocol 4 or 5,
#   and cannot map files of the format before torch 1.6, so that every process would hold the whole file. torch 2.6 trusts
#   the sizes in a file: a storage of 16 bytes that claims 65,536 elements exposes the memory behind it (2.15 refuses it).
#   Safe globals belong to the whole process, and leaving ``safe_globals`` removes those that the user has added.
# - ``pickle.Unpickler``, which is written in C, clears 64 GiB of memory for a single instruction (LONG_BINPUT), and its
#   instructions cannot be overridden: it never finishes hashing a key of deeply nested tuples.


DAMAGE = (
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
    pickle.UnpicklingError,
    struct.error,
    zipfile.BadZipFile,
)
"""What reading a damaged file may raise."""
# A pickle of weights has names and shapes only; a larger one has something else.
MAX_BYTES = 256 * 2**20

Known = Callable[[str], Callable[..., Any] | None]
"""Returns, for ``module.name``, the function to call instead; None: the name is not allowed."""


class Inert:
    """Placeholder for an ignored object; instructions of a pickle have no effect on it."""

    def __init__(self, *_: object) -> None: ...

    def _ignore(self, *_: object) -> Inert:
        return Inert()

    __call__ = __setitem__ = append = extend = add = _ignore


class Record:
    """Placeholder for an object whose attributes are read: what the pickle would set is kept as ``state``, unused.

    It may be a key of a dict, which then knows it by identity: nothing in it is hashed or compared.
    """

    def __init__(self, name: str, arguments: tuple[Any, ...]) -> None:
        self.name, self.arguments = name, arguments
        self.state: Any = None


class Named:
    """A class or function that a pickle names, which is called with the function to call instead."""

    def __init__(self, name: str, make: Callable[..., Any]) -> None:
        self.name, self.make = name, make

    def __call__(self, *arguments: Any) -> Any:
        return self.make(*arguments)


class ForbiddenNameError(CheckpointError):
    """A pickle names a class or function that is not allowed."""


def describe(file: IO[bytes] | mmap.mmap, known: Known, persistent: Callable[[Any], Any]) -> Any:
    """Parse one pickle at the current position of ``file``, which is left at the first byte after it.

    Args:
        file: open, binary; it must not take memory for bytes that it does not have.
        known: returns the replacement of a class or function that the pickle names.
        persistent: returns the object for a persistent id, by which torch refers to storages.

    Raises:
        ForbiddenNameError: the pickle names something that ``known`` does not allow.
        pickle.UnpicklingError, ValueError, LookupError, TypeError: it is not a pickle, or it is damaged.
    """
    machine = _Machine(file, encoding="latin-1")
    machine.known, machine.persistent_load = known, persistent
    return machine.load()


_InPython: Any = pickle._Unpickler


class _Machine(_InPython):  # type: ignore[misc]
    """Python's machine for pickles in Python, without the instructions that change or hash whatever they are given."""

    known: Known

    def find_class(self, module: str, name: str) -> Named:
        """Return what stands for a class or function; nothing is imported."""
        # Protocol 2, which torch.save uses, has the module name of Python 2.
        full = f"{'builtins' if module == '__builtin__' else module}.{name}"
        make = self.known(full)
        if make is None:
            raise ForbiddenNameError(full)
        return Named(full, make)

    def make_ignored(self) -> None:
        """Push a placeholder for an object of a class that is called with keywords."""
        del self.stack[-3:]
        self.append(Inert())

    def set_state(self) -> None:
        """Keep the attributes of a Record; those of other objects are ignored."""
        state = self.stack.pop()
        if isinstance(self.stack[-1], Record):
            self.stack[-1].state = state

    def set_item(self) -> None:
        """Add one item to a dict."""
        items = self.stack[-2:]
        del self.stack[-2:]
        self._update(items)

    def set_items(self) -> None:
        """Add the items since the last mark to a dict."""
        self._update(self.pop_mark())

    def _update(self, items: list[Any]) -> None:
        for key, value in pairs(zip(items[::2], items[1::2], strict=True)).items():
            self.stack[-1][key] = value

    def push_dict(self) -> None:
        """Push a dict of the items since the last mark."""
        items = self.pop_mark()
        self.append(pairs(zip(items[::2], items[1::2], strict=True)))

    def push_set(self) -> None:
        """Push a placeholder for an empty set, because its items would be hashed."""
        self.append(Inert())

    def push_frozen_set(self) -> None:
        """Push a placeholder for a frozen set."""
        self.pop_mark()
        self.append(Inert())

    # It also knows no array of bytes, which takes its memory before there are bytes, and no registry of extensions.
    dispatch = {
        code: run
        for code, run in _InPython.dispatch.items()
        if bytes([code]) not in (pickle.BYTEARRAY8, pickle.EXT1, pickle.EXT2, pickle.EXT4)
    } | {
        pickle.NEWOBJ[0]: _InPython.load_reduce,
        pickle.NEWOBJ_EX[0]: make_ignored,
        pickle.BUILD[0]: set_state,
        pickle.SETITEM[0]: set_item,
        pickle.SETITEMS[0]: set_items,
        pickle.DICT[0]: push_dict,
        pickle.EMPTY_SET[0]: push_set,
        pickle.FROZENSET[0]: push_frozen_set,
    }


def pairs(items: Any) -> dict[Any, Any]:
    """A dict of the (key, value) pairs whose key is a plain value or a Record; names of tensors always are plain.

    Hashing other keys is not safe: for a tuple that has another tuple twice, which has a third one twice, and so on, it
    never finishes.
    """
    return {key: value for key, value in items if isinstance(key, _PLAIN_TYPES)}


_PLAIN_TYPES = (str, bytes, int, float, type(None), Record)


class _Mapped(mmap.mmap):
    """A mapped file with what zipfile asks of a file, which mmap has since Python 3.13."""

    def seekable(self) -> bool:
        """True, as for a file."""
        return True


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
        marks: "conj" and "neg", if torch conjugates and negates the elements when they are read.
    """

    storage: Storage
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    kind: str = "strided"
    marks: frozenset[str] = frozenset()

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
            with (
                path.open("rb") as file,
                _Mapped(file.fileno(), self._start + self.size, access=mmap.ACCESS_READ) as data,
            ):
                is_zip = data[self._start : self._start + 2] == b"PK"
                self.content = self._read_zip(data) if is_zip else self._read_legacy(data)
        except ForbiddenNameError as error:
            raise CheckpointError(
                f"{path}: cannot be read as weights, it holds {error}, and loading that would execute code; "
                "save the state dict alone"
            ) from None
        except CheckpointError as error:
            raise CheckpointError(f"{path}: cannot be read as weights, {error}") from None
        except DAMAGE:
            raise CheckpointError(
                f"{path}: cannot be read as weights, it is damaged, or was not written by torch.save"
            ) from None

    def map(self) -> Callable[[StoredTensor], Tensor]:
        """Map the file; return a function that gives a tensor as a view of it. Using the tensor reads the file."""
        data = torch.from_file(str(self.path), shared=False, size=self._file_size, dtype=torch.uint8)

        def tensor(stored: StoredTensor) -> Tensor:
            storage = stored.storage
            begin = self._begins[storage.key] + storage.offset * storage.dtype.itemsize
            part = data[begin : begin + storage.nbytes]
            if begin % stored.dtype.itemsize:  # the old format does not align tensors
                part = part.clone()
            flat = part[: part.numel() // stored.dtype.itemsize * stored.dtype.itemsize].view(stored.dtype)
            view = flat.as_strided(stored.shape, stored.stride, flat.storage_offset() + stored.offset)
            view = view.conj() if "conj" in stored.marks else view
            return view.neg() if "neg" in stored.marks else view

        return tensor

    # The formats

    def _read_zip(self, data: _Mapped) -> Any:
        # What is before a span is to zipfile what may be before any archive.
        with zipfile.ZipFile(data) as archive:  # type: ignore[call-overload]
            records = {record.filename: record for record in archive.infolist()}
        root = next(iter(records)).partition("/")[0]
        if f"{root}/constants.pkl" in records:
            raise CheckpointError("it is a TorchScript archive, which is code; save the state dict alone")
        # torch never compresses, and a small compressed record could expand to any size.
        packed = [name for name, record in records.items() if record.compress_type != zipfile.ZIP_STORED]
        if packed:
            raise CheckpointError(f"{packed[0]} in it is compressed, which torch.save does not do")
        if byteorder := records.get(f"{root}/byteorder"):
            begin = self._begin(data, byteorder)
            _check_byteorder(data[begin : begin + byteorder.file_size])
        sizes = {}
        for name, record in records.items():
            if name.startswith(f"{root}/data/"):
                key = name.removeprefix(f"{root}/data/")
                self._begins[key], sizes[key] = self._begin(data, record), record.file_size
        content = records[f"{root}/data.pkl"]
        if content.file_size > MAX_BYTES:
            raise CheckpointError(f"its pickle has more than {MAX_BYTES} bytes, which names and shapes do not need")
        data.seek(self._begin(data, content))
        return describe(data, self._known, lambda given: self._storage(given, sizes))

    def _begin(self, data: _Mapped, record: zipfile.ZipInfo) -> int:
        """Offset of a record's content in the file."""
        local = data[record.header_offset : record.header_offset + 30]
        name, extra = struct.unpack("<HH", local[26:30])
        begin = record.header_offset + 30 + int(name) + int(extra)
        if not self._start <= begin <= begin + record.file_size <= len(data):
            raise ValueError("a record that is not all there")
        return begin

    def _read_legacy(self, data: _Mapped) -> Any:
        data.seek(self._start)
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

        content = describe(data, self._known, storage)
        for key in self._without_storages(data):
            (numel,) = struct.unpack("<q", data.read(8))
            begin, nbytes = data.tell(), storages[str(key)].nbytes
            if numel != storages[str(key)].numel or begin + nbytes > len(data):
                raise CheckpointError(f"a tensor of {nbytes} bytes exceeds the {self.size} bytes of the file")
            self._begins[str(key)] = begin
            data.seek(begin + nbytes)
        if storages.keys() - self._begins.keys():
            raise ValueError("a storage that is not there")
        return content

    def _without_storages(self, data: _Mapped) -> Any:
        return describe(data, self._known, _no_storage)

    def _storage(self, given: Any, sizes: Mapping[str, int]) -> Storage:
        found = _storage_of(given)
        if found.key not in sizes or found.nbytes > sizes[found.key]:
            raise CheckpointError(f"a tensor of {found.nbytes} bytes exceeds the {self.size} bytes of the file")
        return found

    # Functions and classes that a pickle of tensors names

    def _known(self, name: str) -> Callable[..., Any] | None:
        return _MADE.get(name) or (self._tensor if name in _TENSORS else None) or (Inert if _inert(name) else None)

    def _tensor(self, storage: Any, offset: Any, shape: Any, stride: Any, *rest: Any) -> StoredTensor:
        """Called instead of torch's functions that make a tensor of a storage; version 3 also passes the dtype.

        The last argument, a dict, has torch's marks of lazy conjugation and negation.
        """
        named = (_DTYPES[part.name] for part in rest if isinstance(part, Named) and part.name in _DTYPES)
        dtype = next(named, storage.dtype)
        marks = frozenset(
            mark for mark in ("conj", "neg") for part in rest if isinstance(part, dict) and part.get(mark)
        )
        stored = StoredTensor(storage, dtype, offset, tuple(shape), tuple(stride), marks=marks)
        if not stored.is_inside(max(self.size, _EXPANDED_BYTES)):
            raise CheckpointError(f"a tensor of shape {list(shape)[:8]} exceeds the {self.size} bytes of the file")
        return stored


def _check_byteorder(written: bytes) -> None:
    if written != sys.byteorder.encode():
        raise CheckpointError("it was written on a machine with another byte order")


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
    return function(*arguments)


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
