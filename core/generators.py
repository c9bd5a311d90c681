"""The generators that data draw from, those of Python, NumPy and torch on the CPU: seeded, exchanged and watched cheaply."""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

_PYTHON: Any = random._inst  # behind the functions of `random`
_NUMPY: Any = np.random  # its annotations lack two functions that are public since 1.24
_TORCH = torch.default_generator
_WORDS = 625  # of a Mersenne twister: its state and the place in it
_BYTES = 4 * _WORDS
_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15


def mix(number: int) -> int:
    """A number of 64 bits in which every bit depends on every bit of ``number``; each is given once.

    Source: the finalizer of SplitMix64, Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators (OOPSLA 2014).
    """
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    number = (number ^ number >> 27) * 0x94D049BB133111EB & _MASK
    return number ^ number >> 31


def nth_seed(seed: int, place: int) -> int:
    """Number ``place`` of the seeds that SplitMix64 draws from ``seed``, without drawing those before it."""
    return mix(seed + _GAMMA * (place + 1) & _MASK)


def epoch_seed(seed: int, epoch: int) -> int:
    """The seed (64 bits) of an epoch; source: ``numpy.random.SeedSequence``."""
    return int(np.random.SeedSequence([seed % 2**64, epoch % 2**64]).generate_state(1, np.uint64)[0])


def seed_generators(seed: int) -> None:
    """Seed Python, NumPy and torch on the CPU with 64 bits."""
    random.seed(seed)
    np.random.seed(seed >> 32)  # both take 32 bits, and would give the same numbers with the same ones
    _TORCH.manual_seed(seed & 0xFFFFFFFF)


class Apart:
    """Inside ``with apart:`` the generators may be moved, and after it they stand where they stood before.

    NumPy draws from a generator of its own meanwhile. With that it forgets the second of a pair of normal numbers, which
    it keeps for the next call of ``np.random.randn``: this happens whatever is drawn inside, so that it does not matter
    what that is.
    """

    def __init__(self) -> None:
        self._numpy = np.random.MT19937(0)

    def __enter__(self) -> Apart:
        self._python, self._torch = _python_state(), _TORCH.get_state()
        self._outer_numpy = _NUMPY.get_bit_generator()
        _NUMPY.set_bit_generator(self._numpy)
        return self

    def __exit__(self, *exc_info: object) -> None:
        _set_python_state(self._python)
        _NUMPY.set_bit_generator(self._outer_numpy)
        _TORCH.set_state(self._torch)


class Watch(Apart):
    """Tells, inside ``with watch:``, whether one of the generators has moved."""

    def __init__(self) -> None:
        super().__init__()
        self._numpy_place = _numpy_place(self._numpy)

    def __enter__(self) -> Watch:
        super().__enter__()
        self._mark: tuple[Any, Any, Tensor] = (_python_place(), self._numpy_place(), self._torch)
        return self

    def mark(self) -> None:
        """Note where the generators stand; without it, it is where they stood at the beginning."""
        self._mark = (_python_place(), self._numpy_place(), _TORCH.get_state())

    def moved(self) -> bool:
        """Whether one of them stands elsewhere now."""
        python, numpy, torch_state = self._mark
        if python != _python_place() or numpy != self._numpy_place():
            return True
        return _bytes_of(torch_state) != _bytes_of(_TORCH.get_state())


class RandomStream(Apart):
    """Random numbers apart from the process's, which go on with every ``with stream:`` where the last one ended."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.begin(seed)

    def begin(self, seed: int) -> None:
        """Begin anew with the next ``with stream:``."""
        self._seed = seed
        self._own: tuple[Any, Tensor] | None = None

    def __enter__(self) -> RandomStream:
        super().__enter__()
        if self._own is None:
            random.seed(self._seed)
            np.random.seed(self._seed % 2**32)
            _TORCH.manual_seed(self._seed)
        else:
            _set_python_state(self._own[0])
            _TORCH.set_state(self._own[1])
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._own = _python_state(), _TORCH.get_state()
        super().__exit__(*exc_info)


def forget_spare_normal() -> None:
    """Let NumPy forget what ``Apart`` lets it forget."""
    _NUMPY.set_bit_generator(_NUMPY.get_bit_generator())


# A state is copied and looked at in memory where that is laid out as known, which takes a twentieth of the time that the
# functions for it take. It is checked here, and with CPython 3.10 to 3.13 and NumPy 1.24 to 2.4.


def _python_address() -> int | None:
    """Where Python's generator keeps its place and then 624 words; None for a Python that has them elsewhere."""
    head, probe = object.__basicsize__, random.Random(1)
    if sys.implementation.name != "cpython" or random.Random.__basicsize__ < head + _BYTES:
        return None
    place, *words = (ctypes.c_uint32 * _WORDS).from_address(id(probe) + head)
    return id(_PYTHON) + head if (*words, place) == probe.getstate()[1] else None


def _peek(place: int, words: int) -> Callable[[], tuple[int, int]]:
    """Reads the place in a Mersenne twister's state, and the first words, which are others when it comes round again."""
    at, first = ctypes.c_uint32.from_address(place), ctypes.c_uint64.from_address(words)
    return lambda: (at.value, first.value)


_ADDRESS = _python_address()
_python_peek = random.getstate if _ADDRESS is None else _peek(_ADDRESS, _ADDRESS + 4)


def _python_place() -> Any:
    return _python_peek(), _PYTHON.gauss_next


def _python_state() -> Any:
    if _ADDRESS is None:
        return random.getstate()
    return ctypes.string_at(_ADDRESS, _BYTES), _PYTHON.gauss_next


def _set_python_state(state: Any) -> None:
    if _ADDRESS is None:
        random.setstate(state)
    else:
        ctypes.memmove(_ADDRESS, state[0], _BYTES)
        _PYTHON.gauss_next = state[1]


def _numpy_place(generator: np.random.MT19937) -> Callable[[], Any]:
    """A function that says where the generator stands, to compare."""
    address: int = generator.ctypes.state_address
    *words, place = (ctypes.c_uint32 * _WORDS).from_address(address)
    state: Any = generator.state["state"]
    if words == state["key"].tolist() and place == state["pos"]:
        return _peek(address + _BYTES - 4, address)
    return lambda: (generator.state["state"]["pos"], generator.state["state"]["key"].tobytes())


def _bytes_of(state: Tensor) -> bytes:
    return ctypes.string_at(state.data_ptr(), state.numel())  # compared in a third of the time that torch.equal takes
