"""Read files of ``torch.save`` without unpickling: their content, and their tensors as views of the mapped file."""

from __future__ import annotations

import math
import mmap
import pickletools
import re
import struct
import sys
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TypeAlias

import torch
from torch import Tensor

from ...base.errors import CheckpointError

# A part of a mapped file, used like the whole of one.


class MappedSpan:
    """A part of a mapped file, which reads, seeks and slices like a mapped file of its own.

    Args:
        data: the mapped file.
        begin: offset of the part, in bytes.
        length: its size in bytes.

    Raises:
        ValueError: the part is not inside the file.
    """

    def __init__(self, data: mmap.mmap, begin: int, length: int) -> None:
        if not 0 <= begin <= begin + length <= len(data):
            raise ValueError("a part that is not inside the file")
        self._data, self._begin, self._length = data, begin, length
        self._at = 0

    def __enter__(self) -> MappedSpan:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        pass

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, part: slice) -> bytes:
        begin, end, _ = part.indices(self._length)
        return self._data[self._begin + begin : self._begin + max(begin, end)]

    def tell(self) -> int:
        """The position of the next byte to read."""
        return self._at

    def seek(self, position: int, whence: int = 0) -> int:
        """Move to a position from the beginning (0), from here (1), or from the end (2).

        Raises:
            ValueError: it is outside of the part.
        """
        position += (0, self._at, self._length)[whence]
        if not 0 <= position <= self._length:
            raise ValueError("a position outside of the part")
        self._at = position
        return position

    def seekable(self) -> bool:
        """True, as for a file."""
        return True

    def read(self, size: int | None = -1) -> bytes:
        """Read at most ``size`` bytes; -1 or None: all that are left."""
        end = self._length if size is None or size < 0 else min(self._length, self._at + size)
        found = self[self._at : end]
        self._at = end
        return found

    def readline(self) -> bytes:
        """Read up to the end of a line, or to the end of the part."""
        end = self._data.find(b"\n", self._begin + self._at, self._begin + self._length)
        return self.read(-1 if end < 0 else end + 1 - self._begin - self._at)


Mapped: TypeAlias = "mmap.mmap | MappedSpan"


# Parse a pickle safely: read its content without importing or executing anything that it names.
#
# A pickle is a program that may call anything that can be imported. The machine here follows its instructions, but it
# imports nothing and calls only the functions that it was given. It builds dicts, lists and tuples, and every class
# or function that the program names must be known in advance.
#
# Two alternatives were tried with tests/checkpoint/test_sources.py and test_attacks.py, and have these problems:
#
# - ``torch.load(weights_only=True, mmap=True)`` with placeholders as safe globals cannot read pickles of protocol 4 or 5,
#   and cannot map files of the format before torch 1.6, so that every process would hold the whole file. torch 2.6 trusts
#   the sizes in a file: a storage of 16 bytes that claims 65,536 elements exposes the memory behind it (2.15 refuses it).
#   Safe globals belong to the whole process, and leaving ``safe_globals`` removes those that the user has added.
# - ``pickle.Unpickler`` with our own ``find_class`` clears 64 GiB of memory for a single instruction (LONG_BINPUT), and
#   never finishes hashing a key of deeply nested tuples.


# A pickle of weights has names and shapes only; a larger one has something else.
MAX_BYTES = 256 * 2**20

Known = Callable[[str], Callable[..., Any] | None]
"""Returns, for ``module.name``, the function to call instead; None: the name is not allowed."""
_MARK = object()


class Inert:
    """Placeholder for an ignored object; instructions of a pickle have no effect on it."""

    def __init__(self, *_: object) -> None: ...


class Record:
    """Placeholder for an object whose attributes are read: what the pickle would set is kept as ``state``, unused.

    It may be a key of a dict, which then knows it by identity: nothing in it is hashed or compared.
    """

    def __init__(self, name: str, arguments: tuple[Any, ...]) -> None:
        self.name, self.arguments = name, arguments
        self.state: Any = None


class Named:
    """A class or function that a pickle names, with the function to call instead."""

    def __init__(self, name: str, make: Callable[..., Any]) -> None:
        self.name, self.make = name, make


class ForbiddenNameError(CheckpointError):
    """A pickle names a class or function that is not allowed."""


def describe(file: IO[bytes], known: Known, persistent: Callable[[Any], Any]) -> Any:
    """Parse one pickle at the current position of ``file``, which is left at the first byte after it.

    Args:
        file: open, binary.
        known: returns the replacement of a class or function that the pickle names.
        persistent: returns the object for a persistent id, by which torch refers to storages.

    Raises:
        ForbiddenNameError: the pickle names something that ``known`` does not allow.
        ValueError, LookupError, TypeError: it is not a pickle, or it is damaged.
    """
    machine = _Machine(known, persistent)
    start = file.tell()
    for opcode, argument, position in pickletools.genops(file):
        if (position or 0) - start > MAX_BYTES:
            raise CheckpointError(f"its pickle has more than {MAX_BYTES} bytes, which names and shapes do not need")
        machine.step(opcode.name, argument)
    return machine.stack.pop()


class _Machine:
    """The stack machine that runs a pickle's instructions; see the documentation of ``pickletools``."""

    def __init__(self, known: Known, persistent: Callable[[Any], Any]) -> None:
        self.known, self.persistent = known, persistent
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def step(self, name: str, argument: Any) -> None:
        """Run one instruction."""
        if name in _LITERALS:
            self.stack.append(argument)
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name]())
        elif name in _INSTRUCTIONS:
            _INSTRUCTIONS[name](self, argument)
        elif name not in ("PROTO", "FRAME", "STOP"):
            raise ValueError(f"instruction {name}")

    def pop_to_mark(self) -> list[Any]:
        """Remove and return the items since the last mark."""
        items = []
        while (item := self.stack.pop()) is not _MARK:
            items.append(item)
        return items[::-1]

    # Names

    def name(self, argument: str) -> None:
        """Push a class or function; the argument is "module name"."""
        self.stack.append(self._global(argument.replace(" ", ".", 1)))

    def name_from_stack(self, _: object) -> None:
        """Push a class or function, with module and name from the stack."""
        module, name = self._pop(2)
        self.stack.append(self._global(f"{module}.{name}"))

    def _global(self, name: str) -> Named:
        # Protocol 2, which torch.save uses, has the module name of Python 2.
        name = re.sub(r"^__builtin__\.", "builtins.", name)
        make = self.known(name)
        if make is None:
            raise ForbiddenNameError(name)
        return Named(name, make)

    # Calls of the replacement functions

    def call(self, _: object) -> None:
        """Call a function with a tuple of arguments, both from the stack."""
        function, arguments = self._pop(2)
        self.stack.append(self._call(function, arguments))

    def call_with_keywords(self, _: object) -> None:
        """Push a placeholder: this instruction makes objects of classes, which are ignored."""
        self._pop(3)
        self.stack.append(Inert())

    def call_marked(self, _: object) -> None:
        """Call a function with arguments, all since the last mark."""
        function, *arguments = self.pop_to_mark()
        self.stack.append(self._call(function, tuple(arguments)))

    def call_named(self, argument: str) -> None:
        """Call the function that the instruction names, with the arguments since the last mark."""
        arguments = tuple(self.pop_to_mark())
        self.stack.append(self._call(self._global(argument.replace(" ", ".", 1)), arguments))

    def _call(self, function: Any, arguments: Any) -> Any:
        if isinstance(function, Inert):
            return Inert()
        if not isinstance(function, Named) or not isinstance(arguments, tuple):
            raise TypeError("a call of something that is no function")
        return function.make(*arguments)

    def set_state(self, _: object) -> None:
        """Keep the attributes of a Record; those of other objects are ignored."""
        (state,) = self._pop(1)
        if isinstance(self.stack[-1], Record):
            self.stack[-1].state = state

    def by_id(self, _: object) -> None:
        """Push the object of a persistent id, which is outside of the pickle."""
        self.stack.append(self.persistent(self.stack.pop()))

    # Containers

    def append(self, _: object) -> None:
        """Append one item to a list."""
        (item,) = self._pop(1)
        self._extend([item])

    def extend(self, _: object) -> None:
        """Append the items since the last mark to a list."""
        self._extend(self.pop_to_mark())

    def _extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, list):
            target.extend(items)
        elif not isinstance(target, Inert):
            raise TypeError("items for what is no list")

    def set_item(self, _: object) -> None:
        """Add one item to a dict."""
        self._update(self._pop(2))

    def update(self, _: object) -> None:
        """Add the items since the last mark to a dict."""
        self._update(self.pop_to_mark())

    def _update(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, dict):
            target.update(pairs(zip(items[::2], items[1::2], strict=True)))
        elif not isinstance(target, Inert):
            raise TypeError("items for what is no dict")

    def marked_dict(self, _: object) -> None:
        """Push a dict of the items since the last mark."""
        items = self.pop_to_mark()
        self.stack.append(pairs(zip(items[::2], items[1::2], strict=True)))

    def forget_marked(self, _: object) -> None:
        """Drop the items since the last mark: those of a set are ignored."""
        self.pop_to_mark()

    def frozen_set(self, _: object) -> None:
        """Push a placeholder for a frozen set, which is ignored."""
        self.pop_to_mark()
        self.stack.append(Inert())

    # The stack

    def duplicate(self, _: object) -> None:
        """Push the topmost item again."""
        self.stack.append(self.stack[-1])

    def remember(self, index: int | None) -> None:
        """Store the topmost item in the memo."""
        self.memo[len(self.memo) if index is None else int(index)] = self.stack[-1]

    def recall(self, index: int) -> None:
        """Push an item of the memo."""
        self.stack.append(self.memo[int(index)])

    def _pop(self, count: int) -> list[Any]:
        items = self.stack[-count:]
        if len(items) < count or any(item is _MARK for item in items):
            raise ValueError("too few items on the stack")
        del self.stack[-count:]
        return items


def pairs(items: Any) -> dict[Any, Any]:
    """A dict of the (key, value) pairs whose key is a plain value or a Record; names of tensors always are plain.

    Hashing other keys is not safe: for a tuple that has another tuple twice, which has a third one twice, and so on, it
    never finishes.
    """
    return {key: value for key, value in items if isinstance(key, _PLAIN_TYPES)}


_PLAIN_TYPES = (str, bytes, int, float, type(None), Record)
_LITERALS = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
}
_CONSTANTS: Mapping[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_SET": Inert,
    "MARK": lambda: _MARK,
}
_INSTRUCTIONS: Mapping[str, Callable[[_Machine, Any], None]] = {
    "GLOBAL": _Machine.name,
    "STACK_GLOBAL": _Machine.name_from_stack,
    "REDUCE": _Machine.call,
    "NEWOBJ": _Machine.call,
    "NEWOBJ_EX": _Machine.call_with_keywords,
    "OBJ": _Machine.call_marked,
    "INST": _Machine.call_named,
    "BUILD": _Machine.set_state,
    "BINPERSID": _Machine.by_id,
    "APPEND": _Machine.append,
    "APPENDS": _Machine.extend,
    "SETITEM": _Machine.set_item,
    "SETITEMS": _Machine.update,
    "DICT": _Machine.marked_dict,
    "LIST": lambda machine, _: machine.stack.append(machine.pop_to_mark()),
    "TUPLE": lambda machine, _: machine.stack.append(tuple(machine.pop_to_mark())),
    "TUPLE1": lambda machine, _: machine.stack.append(tuple(machine._pop(1))),
    "TUPLE2": lambda machine, _: machine.stack.append(tuple(machine._pop(2))),
    "TUPLE3": lambda machine, _: machine.stack.append(tuple(machine._pop(3))),
    "ADDITEMS": _Machine.forget_marked,
    "FROZENSET": _Machine.frozen_set,
    "POP": lambda machine, _: machine.stack.pop() and None,
    "POP_MARK": _Machine.forget_marked,
    "DUP": _Machine.duplicate,
    "PUT": _Machine.remember,
    "BINPUT": _Machine.remember,
    "LONG_BINPUT": _Machine.remember,
    "MEMOIZE": _Machine.remember,
    "GET": _Machine.recall,
    "BINGET": _Machine.recall,
    "LONG_BINGET": _Machine.recall,
}


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
