"""What stands in a pickle, without carrying it out.

A pickle is a program, and it may call whatever can be imported. Here its instructions are followed by a machine that imports
nothing and calls nothing but the functions it was given: it builds plain containers, and every class or function that the
program names has to be known beforehand.

Two libraries do much of this, and were tried in its place with tests/checkpoint/test_sources.py and test_attacks.py:

- ``torch.load(weights_only=True, mmap=True)`` with stand-ins as safe globals reads no pickle of protocol 4 or 5, and maps no
  file of the format before torch 1.6, so that every process would hold all of it. torch 2.6 believes what a file says of its
  sizes: a storage of 16 bytes that claims 65,536 elements gives what lies behind it in memory; 2.15 refuses that one. The safe
  globals belong to the whole process, and leaving ``safe_globals`` forgets those that a user has added.
- ``pickle.Unpickler`` with a ``find_class`` of our own clears 64 GiB of memory for a single instruction (LONG_BINPUT), and
  hashes a key of nested tuples for ever.
"""

from __future__ import annotations

import pickletools
import re
from collections.abc import Callable, Mapping
from typing import IO, Any

from ...errors import CheckpointError

# What a pickle of weights consists of is names and shapes; one of this size holds something else.
MAX_BYTES = 256 * 2**20

Known = Callable[[str], Callable[..., Any] | None]
"""From ``module.name`` to what is called in its place; None: this name is not allowed."""
_MARK = object()


class Inert:
    """Stands for what is not looked at; whatever a pickle does to it, nothing happens."""

    def __init__(self, *_: object) -> None: ...


class Named:
    """A class or function that a pickle names."""

    def __init__(self, name: str, make: Callable[..., Any]) -> None:
        self.name, self.make = name, make


class ForbiddenNameError(CheckpointError):
    """A pickle names a class or function that is not known."""


def describe(file: IO[bytes], known: Known, persistent: Callable[[Any], Any]) -> Any:
    """The content of one pickle, which begins where ``file`` stands; behind it, the file stands at what follows.

    Args:
        file: positioned, binary.
        known: what stands for the classes and functions that the pickle names.
        persistent: from a persistent id, which is how torch refers to storages, to what stands for it.

    Raises:
        ForbiddenNameError: the pickle names something that ``known`` does not.
        ValueError, LookupError, TypeError: it is no pickle, or a damaged one.
    """
    machine = _Machine(known, persistent)
    start = file.tell()
    for opcode, argument, position in pickletools.genops(file):
        if (position or 0) - start > MAX_BYTES:
            raise CheckpointError(f"its pickle has more than {MAX_BYTES} bytes, which names and shapes do not need")
        machine.step(opcode.name, argument)
    return machine.stack.pop()


class _Machine:
    """The stack machine that a pickle is written for; see the documentation of ``pickletools``."""

    def __init__(self, known: Known, persistent: Callable[[Any], Any]) -> None:
        self.known, self.persistent = known, persistent
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def step(self, name: str, argument: Any) -> None:
        """Follow one instruction."""
        if name in _LITERALS:
            self.stack.append(argument)
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name]())
        elif name in _INSTRUCTIONS:
            _INSTRUCTIONS[name](self, argument)
        elif name not in ("PROTO", "FRAME", "STOP"):
            raise ValueError(f"instruction {name}")

    def pop_to_mark(self) -> list[Any]:
        """What was put on the stack since the last mark."""
        items = []
        while (item := self.stack.pop()) is not _MARK:
            items.append(item)
        return items[::-1]

    # Names

    def name(self, argument: str) -> None:
        """A class or function; the argument is "module name"."""
        self.stack.append(self._global(argument.replace(" ", ".", 1)))

    def name_from_stack(self, _: object) -> None:
        """As before, from two strings on the stack."""
        module, name = self._pop(2)
        self.stack.append(self._global(f"{module}.{name}"))

    def _global(self, name: str) -> Named:
        # Protocol 2, which torch.save uses, has Python 2's name of the module.
        name = re.sub(r"^__builtin__\.", "builtins.", name)
        make = self.known(name)
        if make is None:
            raise ForbiddenNameError(name)
        return Named(name, make)

    # Calls, of functions that the reader has given

    def call(self, _: object) -> None:
        """A call, whatever instruction stands for it."""
        function, arguments = self._pop(2)
        self.stack.append(self._call(function, arguments))

    def call_with_keywords(self, _: object) -> None:
        """Only makes objects of classes, none of which have a meaning here."""
        self._pop(3)
        self.stack.append(Inert())

    def call_marked(self, _: object) -> None:
        """A call whose arguments stand behind a mark."""
        function, *arguments = self.pop_to_mark()
        self.stack.append(self._call(function, tuple(arguments)))

    def call_named(self, argument: str) -> None:
        """A call whose function is named in the instruction."""
        arguments = tuple(self.pop_to_mark())
        self.stack.append(self._call(self._global(argument.replace(" ", ".", 1)), arguments))

    def _call(self, function: Any, arguments: Any) -> Any:
        if isinstance(function, Inert):
            return Inert()
        if not isinstance(function, Named) or not isinstance(arguments, tuple):
            raise TypeError("a call of something that is no function")
        return function.make(*arguments)

    def set_state(self, _: object) -> None:
        """Attributes of an object, none of which have a meaning here."""
        self._pop(1)

    def by_id(self, _: object) -> None:
        """Something that lies outside of the pickle."""
        self.stack.append(self.persistent(self.stack.pop()))

    # Containers

    def append(self, _: object) -> None:
        """One item to a list."""
        (item,) = self._pop(1)
        self._extend([item])

    def extend(self, _: object) -> None:
        """Several items to a list."""
        self._extend(self.pop_to_mark())

    def _extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, list):
            target.extend(items)
        elif not isinstance(target, Inert):
            raise TypeError("items for what is no list")

    def set_item(self, _: object) -> None:
        """One item to a dict."""
        self._update(self._pop(2))

    def update(self, _: object) -> None:
        """Several items to a dict."""
        self._update(self.pop_to_mark())

    def _update(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, dict):
            target.update(pairs(zip(items[::2], items[1::2], strict=True)))
        elif not isinstance(target, Inert):
            raise TypeError("items for what is no dict")

    def marked_dict(self, _: object) -> None:
        """A dict of what stands behind a mark."""
        items = self.pop_to_mark()
        self.stack.append(pairs(zip(items[::2], items[1::2], strict=True)))

    def forget_marked(self, _: object) -> None:
        """Items of a set, which have no meaning here."""
        self.pop_to_mark()

    def frozen_set(self, _: object) -> None:
        """A set, which has no meaning here."""
        self.pop_to_mark()
        self.stack.append(Inert())

    # The stack

    def duplicate(self, _: object) -> None:
        """The topmost item once more."""
        self.stack.append(self.stack[-1])

    def remember(self, index: int | None) -> None:
        """Keep the topmost item for later."""
        self.memo[len(self.memo) if index is None else int(index)] = self.stack[-1]

    def recall(self, index: int) -> None:
        """An item that was kept."""
        self.stack.append(self.memo[int(index)])

    def _pop(self, count: int) -> list[Any]:
        items = self.stack[-count:]
        if len(items) < count or any(item is _MARK for item in items):
            raise ValueError("too few items on the stack")
        del self.stack[-count:]
        return items


def pairs(items: Any) -> dict[Any, Any]:
    """A dict of those of the (key, value) pairs whose key is a plain value; no name of a tensor is anything else.

    To hash a tuple that holds another tuple twice, which does so in turn, and so on, would take forever.
    """
    return {key: value for key, value in items if isinstance(key, _PLAIN)}


_PLAIN = (str, bytes, int, float, type(None))
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
