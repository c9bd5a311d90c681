"""Snapshot: what objects of the user hold now, to restore it after a trial of their methods."""

from __future__ import annotations

import functools
import random
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ..torch_compat.torch_private import version_of

_MOST_OBJECTS = 20_000
_MOST_ITEMS = 100_000
"""Longer containers are data, not state: they are not copied."""
_FOLLOWED_ITEMS = 1_000
_MOST_BYTES = 2**20
"""Larger arrays outside of modules are data too."""
_MOST_BYTES_IN_ALL = 2**26
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}

# Libraries whose objects stand for something outside of their attributes: files, threads, processes, handlers of logs.
_OUTSIDE = frozenset(
    ("asyncio", "concurrent", "ctypes", "io", "logging", "multiprocessing", "queue", "rich", "selectors")
)
_OUTSIDE |= {"socket", "ssl", "subprocess", "tempfile", "threading", "weakref"}
_VALUES = (str, bytes, int, float, complex, bool, type(None), type, types.ModuleType, types.FunctionType)
_LISTS, _SETS = (list, deque), (set,)
_ITERATORS: tuple[type, ...] = (type(iter([])), type(iter(())), type(iter(range(0))))


class Snapshot:
    """What objects hold: attributes, items of lists, dicts and sets, positions of generators and iterators, buffers.

    What they refer to is held too. Of modules only attributes that are values, containers, arrays, generators or objects of
    the user's are, also within containers, because an engine that trains the module may keep objects of its own in it;
    parameters are not. Not covered are large arrays and tensors outside of modules, tensors of modules that are no buffers
    beyond 64 MiB in all, memory behind objects that Python does not see, and what classes, functions and closures hold.

    Args:
        roots: the objects.
        but: objects not to look into.
    """

    def __init__(self, roots: Iterable[object], but: Iterable[object] = ()) -> None:
        self._seen = {id(one): one for one in but}
        self._restore: list[Callable[[], None]] = []
        self._bytes_left = _MOST_BYTES_IN_ALL
        pending = list(roots)
        while pending and len(self._restore) < _MOST_OBJECTS:
            one = pending.pop()
            if isinstance(one, _VALUES) or id(one) in self._seen:
                continue
            self._seen[id(one)] = one
            pending += self._take(one)

    def restore(self) -> None:
        """Make all objects hold what they held."""
        for restore in reversed(self._restore):
            restore()

    def _take(self, one: Any) -> Iterable[object]:
        """Keep what ``one`` holds, and return what to look into next."""
        if isinstance(one, (Tensor, np.ndarray)):
            self._take_numbers(one, _MOST_BYTES)
        elif isinstance(one, _ITERATORS):
            self._restore += _of_iterator(one)
        elif restore := _of_generator(one):
            self._restore.append(restore)
        elif isinstance(one, (tuple, frozenset)):
            return one if len(one) <= _FOLLOWED_ITEMS else ()
        elif isinstance(one, (*_LISTS, *_SETS, dict)):
            return self._take_container(one)
        elif isinstance(one, nn.Module):
            return self._take_module(one)
        elif isinstance(one, types.MethodType):
            return (one.__self__,)
        elif isinstance(one, functools.partial):
            return (one.func, one.args, one.keywords)
        elif not stands_for_something_outside(one):
            return self._take_attributes(one)
        return ()

    def _take_numbers(self, one: Any, most_bytes: int) -> None:
        if one.nbytes <= min(most_bytes, self._bytes_left):
            self._bytes_left -= one.nbytes
            self._restore += _of_tensor(one) if isinstance(one, Tensor) else _of_array(one)

    def _take_container(self, one: Any) -> Iterable[object]:
        if len(one) > _MOST_ITEMS:
            return ()
        self._restore.append(_of_container(one))
        items = one.values() if isinstance(one, dict) else one
        return [*items, *vars(one).values()] if hasattr(one, "__dict__") else list(items)[:_FOLLOWED_ITEMS]

    def _take_attributes(self, one: Any) -> Iterable[object]:
        inside: list[object] = []
        if slots := _slots(type(one)):
            held_in_slots = {slot: slot.__get__(one, type(one)) for slot in slots if _is_filled(slot, one)}
            self._restore.append(_of_slots(one, slots, held_in_slots))
            inside += held_in_slots.values()
        held = getattr(one, "__dict__", None)
        if isinstance(held, dict):
            self._restore.append(_of_container(held))
            inside += held.values()
        return inside

    def _take_module(self, module: nn.Module) -> Iterable[object]:
        for buffer in module.buffers(recurse=False):
            self._restore += _of_tensor(buffer)
        own = {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}
        held = {name: value for name, value in own.items() if isinstance(value, _HELD_BY_MODULES) or _is_users(value)}
        self._restore.append(_of_entries(vars(module), held))
        self._restore.append(_of_buffers(module))
        inside = [one for value in held.values() for one in self._take_held(value)]
        for one in inside:
            if isinstance(one, (Tensor, np.ndarray)) and id(one) not in self._seen:
                self._seen[id(one)] = one
                self._take_numbers(one, _MOST_BYTES_IN_ALL)
        return [*module.children(), *inside]

    def _take_held(self, value: Any) -> list[Any]:
        """Keep the items of a module's containers, and return what they hold beyond values."""
        if not isinstance(value, (dict, *_LISTS, *_SETS, tuple)):
            return [value] if isinstance(value, _NUMBERS) or _is_users(value) else []
        if id(value) in self._seen or len(value) > _MOST_ITEMS:
            return []
        self._seen[id(value)] = value
        if not isinstance(value, tuple):
            self._restore.append(_of_container(value))
        items = dict.values(value) if isinstance(value, dict) else value
        return [one for item in items for one in self._take_held(item)] if len(items) <= _FOLLOWED_ITEMS else []


_NUMBERS = (Tensor, np.ndarray, torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_HELD_BY_MODULES = (str, bytes, int, float, complex, bool, type(None), tuple, dict, *_LISTS, *_SETS, *_NUMBERS)
_ENGINES = frozenset(("builtins", "torch", "torch_npu", "deepspeed", "transformers", "peft", "numpy", "triton"))
_ENGINES |= {"apex", "transformer_engine", __name__.partition(".")[0]}


def _is_users(value: object) -> bool:
    """Whether an attribute of a module is an object of the user's, which no engine keeps there."""
    return hasattr(value, "__dict__") and type(value).__module__.partition(".")[0] not in _ENGINES


def stands_for_something_outside(one: object) -> bool:
    """Whether an object is not what its attributes hold: a file, a thread, a logger, a module, an optimizer."""
    return (
        isinstance(one, (types.ModuleType, Optimizer, DataLoader)) or type(one).__module__.partition(".")[0] in _OUTSIDE
    )


def _of_generator(one: Any) -> Callable[[], None] | None:
    """A function that restores a generator's position; None if it is none."""
    if isinstance(one, random.Random):
        state = one.getstate()
        return lambda: one.setstate(state)
    if isinstance(one, np.random.Generator):
        bits = one.bit_generator
        return _setter(bits, bits.state)
    if isinstance(one, np.random.BitGenerator):
        return _setter(one, one.state)
    if isinstance(one, np.random.RandomState):
        legacy = one.get_state(legacy=True)
        return lambda: one.set_state(legacy)
    if isinstance(one, torch.Generator):
        words = one.get_state()

        def set_words() -> None:
            one.set_state(words)

        return set_words
    return None


def _of_iterator(one: Any) -> Iterator[Callable[[], None]]:
    """Yield what sets an iterator back, unless it comes to its end in between."""
    reduced = one.__reduce__()
    if len(reduced) == 3:
        yield lambda: one.__setstate__(reduced[2])


def _setter(bits: Any, state: Any) -> Callable[[], None]:
    return lambda: setattr(bits, "state", state)


def _of_tensor(tensor: Tensor) -> Iterator[Callable[[], None]]:
    """Yield what restores the values of an ordinary tensor."""
    is_strided = tensor.layout is torch.strided and not tensor.is_meta and type(tensor) is Tensor
    if not is_strided or tensor.is_inference():
        return
    version, copy = version_of(tensor), tensor.detach().clone()

    def restore() -> None:
        if version_of(tensor) != version:
            with torch.no_grad():
                tensor.copy_(copy)

    yield restore


def _of_array(array: Any) -> Iterator[Callable[[], None]]:
    if not array.flags.writeable or array.dtype.hasobject:
        return
    copy = array.copy()

    def restore() -> None:
        if array.tobytes() != copy.tobytes():
            array[...] = copy

    yield restore


def _of_container(one: Any) -> Callable[[], None]:
    """A function that gives a container the items that it has now, in their order."""
    if isinstance(one, dict):
        base: Any = OrderedDict if isinstance(one, OrderedDict) else dict
        entries = list(base.items(one))

        def restore() -> None:
            if not _alike(list(base.items(one)), entries):
                base.clear(one)
                for key, value in entries:
                    base.__setitem__(one, key, value)

        return restore
    kind: Any = next(base for base in (*_LISTS, *_SETS) if isinstance(one, base))
    items = list(one)

    def refill() -> None:
        now = list(one)
        if len(now) != len(items) or any(a is not b for a, b in zip(now, items, strict=True)):
            kind.clear(one)
            (kind.update if kind is set else kind.extend)(one, items)

    return refill


def _slots(kind: type) -> tuple[types.MemberDescriptorType, ...]:
    """The ``__slots__`` of a class and its bases."""
    own = (vars(base).values() for base in kind.__mro__ if "__slots__" in vars(base))
    return tuple(slot for slots in own for slot in slots if isinstance(slot, types.MemberDescriptorType))


def _is_filled(slot: types.MemberDescriptorType, one: object) -> bool:
    try:
        slot.__get__(one, type(one))
    except AttributeError:
        return False
    return True


def _of_slots(one: object, slots: Iterable[types.MemberDescriptorType], held: dict[Any, Any]) -> Callable[[], None]:
    """A function that restores the slots of an object, past a ``__setattr__`` that refuses."""

    def restore() -> None:
        for slot in slots:
            if slot in held:
                if not _is_filled(slot, one) or slot.__get__(one, type(one)) is not held[slot]:
                    slot.__set__(one, held[slot])
            elif _is_filled(slot, one):
                slot.__delete__(one)

    return restore


def _of_entries(held: dict[str, Any], entries: dict[str, Any]) -> Callable[[], None]:
    """A function that restores some entries of a dict, and leaves the others."""

    def restore() -> None:
        for name, value in entries.items():
            if held.get(name, _NOTHING) is not value:
                held[name] = value

    return restore


def _of_buffers(module: nn.Module) -> Callable[[], None]:
    """A function that makes the names of a module's buffers stand for the tensors that they stand for now."""
    before = dict(module.named_buffers(recurse=False, remove_duplicate=False))

    def restore() -> None:
        for name, buffer in before.items():
            if getattr(module, name, None) is not buffer:
                setattr(module, name, buffer)

    return restore


_NOTHING = object()


def _alike(now: list[tuple[Any, Any]], before: list[tuple[Any, Any]]) -> bool:
    return len(now) == len(before) and all(a is c and b is d for (a, b), (c, d) in zip(now, before, strict=True))
