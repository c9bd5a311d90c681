"""Parse a pickle safely: read its content without importing or executing anything that it names.

A pickle is a program that may call anything that can be imported. The machine here follows its instructions, but it
imports nothing and calls only the functions that it was given. It builds dicts, lists and tuples, and every class or
function that the program names must be known in advance.

Two alternatives were tried with tests/checkpoint/test_sources.py and test_attacks.py, and have these problems:

- ``torch.load(weights_only=True, mmap=True)`` with placeholders as safe globals cannot read pickles of protocol 4 or 5,
  and cannot map files of the format before torch 1.6, so that every process would hold the whole file. torch 2.6 trusts
  the sizes in a file: a storage of 16 bytes that claims 65,536 elements exposes the memory behind it (2.15 refuses it).
  Safe globals belong to the whole process, and leaving ``safe_globals`` removes those that the user has added.
- ``pickle.Unpickler`` with our own ``find_class`` clears 64 GiB of memory for a single instruction (LONG_BINPUT), and
  never finishes hashing a key of deeply nested tuples.
"""

from __future__ import annotations

import pickletools
import re
from collections.abc import Callable, Mapping
from typing import IO, Any

from ...errors import CheckpointError

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
