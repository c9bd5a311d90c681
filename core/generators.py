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

    NumPy draws from another generator meanwhile. Exchanging the two drops a number that NumPy keeps: it draws normal
    numbers in pairs, and ``np.random.randn`` gives the second one at its next call. That number is always dropped, whether
    or not anything is drawn inside.
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
    """Tells, inside ``with watch:``, whether one of the generators has moved; what has not is not put back either."""

    def __init__(self) -> None:
        super().__init__()
        self._numpy_place = _numpy_place(self._numpy)
        self._found: Any = None  # where Python's generator stood when its state was last copied

    def __enter__(self) -> Watch:
        self._is_still = False
        python = _python_place()
        if python != self._found:  # between batches it seldom moves
            self._python, self._found = _python_state(), python
        # Looked at anew every time: dropout on the CPU draws from it between batches.
        self._torch = _TORCH.get_state()
        self._outer_numpy = _NUMPY.get_bit_generator()
        _NUMPY.set_bit_generator(self._numpy)
        self._mark = python, self._numpy_place(), _torch_place(self._torch)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._is_still:
            _NUMPY.set_bit_generator(self._outer_numpy)
        else:
            super().__exit__(*exc_info)

    def mark(self) -> None:
        """Note where the generators stand; without it, it is where they stood at the beginning."""
        self._mark = _python_place(), self._numpy_place(), _torch_place(_TORCH.get_state())

    def moved(self) -> bool:
        """Whether one of them stands elsewhere now."""
        return self._mark != (_python_place(), self._numpy_place(), _torch_place(_TORCH.get_state()))

    def stays_still(self) -> bool:
        """Whether none has moved since the beginning; nothing may move any more then before the end."""
        self._is_still = not self.moved()
        return self._is_still


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
# functions for it take. That is checked at import, and the functions are called where it is not so.


def _python_address() -> int | None:
    """Where Python's generator keeps its place and then 624 words; None for a Python that has them elsewhere."""
    head, probe = object.__basicsize__, random.Random(1)
    if sys.implementation.name != "cpython" or random.Random.__basicsize__ < head + _BYTES:
        return None
    place, *words = (ctypes.c_uint32 * _WORDS).from_address(id(probe) + head)
    return id(_PYTHON) + head if (*words, place) == probe.getstate()[1] else None


def _peek(address: int) -> Callable[[], bytes]:
    """Reads the place in a Mersenne twister's state and the words beside it, which are others when it comes round again."""
    return memoryview((ctypes.c_char * _SEEN).from_address(address)).tobytes


_SEEN = 12
_ADDRESS = _python_address()
_python_peek: Callable[[], Any] = random.getstate if _ADDRESS is None else _peek(_ADDRESS)


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
        return _peek(address + _BYTES - _SEEN)  # here the place comes last
    return lambda: (generator.state["state"]["pos"], generator.state["state"]["key"].tobytes())


_HEAD = 32  # bytes of a state of torch's: seed, place, and the first word, which is another when it comes round again
_TAIL = 40  # the spare normal numbers
_TAIL_AT = _TORCH.get_state().numel() - _TAIL


def _ends_tell() -> bool:
    """Whether the first and last bytes of a state of torch's are others after any number has been drawn."""
    probe, ends = torch.Generator().manual_seed(1), set()
    # Up to where the generator begins with new words, and beyond; the second number of a pair moves nothing else.
    for drawn in (0, 1, 622, 1, 1, 623, 1):
        torch.rand(drawn, generator=probe)
        ends.add(_ends(probe.get_state()))
    for dtype in (torch.float32, torch.float32, torch.float64, torch.float64):
        torch.randn(1, dtype=dtype, generator=probe)
        ends.add(_ends(probe.get_state()))
    return len(ends) == 11


def _ends(state: Tensor) -> tuple[bytes, bytes]:
    address = state.data_ptr()
    return ctypes.string_at(address, _HEAD), ctypes.string_at(address + _TAIL_AT, _TAIL)


def _whole(state: Tensor) -> bytes:
    return ctypes.string_at(state.data_ptr(), _TAIL_AT + _TAIL)


_torch_place: Callable[[Tensor], Any] = _ends if _ends_tell() else _whole
