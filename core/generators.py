"""RNG of Python, NumPy and torch on the CPU: seed them, isolate code from them, and detect draws cheaply."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from .generator_memory import look_at_both, numpy_look, python_state, set_python_state

_PYTHON: Any = random._inst  # behind the functions of `random`
_NUMPY: Any = np.random  # its annotations lack two functions that are public since NumPy 1.24
_TORCH = torch.default_generator
_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15


def mix(number: int) -> int:
    """Hash ``number`` (64 bits) to 64 bits; every bit depends on all bits of it, and different numbers stay different.

    Source: the finalizer of SplitMix64, Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators (OOPSLA 2014).
    """
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    number = (number ^ number >> 27) * 0x94D049BB133111EB & _MASK
    return number ^ number >> 31


def nth_seed(seed: int, number: int) -> int:
    """Seed ``number``, counted from 0, of SplitMix64 with ``seed``; computed without drawing those before it."""
    return mix(seed + _GAMMA * (number + 1) & _MASK)


def epoch_seed(seed: int, epoch: int) -> int:
    """The seed (64 bits) of an epoch; source: ``numpy.random.SeedSequence``."""
    return int(np.random.SeedSequence([seed % 2**64, epoch % 2**64]).generate_state(1, np.uint64)[0])


def seed_alike(seed: int) -> None:
    """Seed Python, NumPy and torch on the CPU with one number; ``seed_generators`` gives each an unrelated one."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    _TORCH.manual_seed(seed)


def seed_generators(seed: int) -> None:
    """Seed Python, NumPy and torch on the CPU with 64 bits."""
    random.seed(seed)
    np.random.seed(seed >> 32)  # NumPy and torch take 32 bits each, and equal seeds would give equal numbers
    _TORCH.manual_seed(seed & 0xFFFFFFFF)


class Apart:
    """Context that restores the RNG state of Python, NumPy and torch (CPU) at its end.

    NumPy draws from another generator inside. Exchanging the two drops a number that NumPy keeps: it draws normal
    numbers in pairs, and ``np.random.randn`` returns the second one at its next call. That number is always dropped,
    whether or not code inside draws.
    """

    def __init__(self) -> None:
        self._numpy = np.random.MT19937(0)
        self._numpy_look, self._look = numpy_look(self._numpy), look_at_both()
        # Position of Python's and torch's generators at the last copy of their states; few batches move them.
        self._at: Any = None
        self.drew = False
        """Whether a generator drew in the last ``with``, which has ended."""

    def __enter__(self) -> None:
        self._outer_numpy = _NUMPY.get_bit_generator()
        _NUMPY.set_bit_generator(self._numpy)
        position = self._look(), _PYTHON.gauss_next
        if position != self._at:
            self._python, self._torch, self._at = python_state(), _TORCH.get_state(), position
        self._mark, self._numpy_mark = position, self._numpy_look()

    def __exit__(self, *exc_info: object) -> None:
        _NUMPY.set_bit_generator(self._outer_numpy)
        self.drew = self._numpy_look() != self._numpy_mark
        if (self._look(), _PYTHON.gauss_next) != self._at:
            self.drew = True
            set_python_state(self._python)
            _TORCH.set_state(self._torch)


class Watch(Apart):
    """Context that also tells whether one of the generators has drawn."""

    def mark(self) -> None:
        """Set the reference for ``moved`` to the current positions; it is the beginning of the context otherwise."""
        self._mark, self._numpy_mark = (self._look(), _PYTHON.gauss_next), self._numpy_look()

    def moved(self) -> bool:
        """Whether a generator has drawn since ``mark``."""
        return self._mark != (self._look(), _PYTHON.gauss_next) or self._numpy_mark != self._numpy_look()


class RandomStream(Apart):
    """Context with a random stream of its own, which continues where the last ``with stream:`` ended."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._own_at: Any = None  # position of the stream's generators at the last copy; None: seed them
        self.begin(seed)

    def begin(self, seed: int) -> None:
        """Restart the stream from ``seed`` at the next ``with stream:``."""
        self._seed, self._own_at = seed, None

    def __enter__(self) -> None:
        super().__enter__()
        if self._own_at is None:
            seed_alike(self._seed)
        else:
            set_python_state(self._own_python)
            _TORCH.set_state(self._own_torch)

    def __exit__(self, *exc_info: object) -> None:
        position = self._look(), _PYTHON.gauss_next
        if position != self._own_at:
            self._own_python, self._own_torch, self._own_at = python_state(), _TORCH.get_state(), position
        super().__exit__(*exc_info)


def forget_spare_normal() -> None:
    """Drop NumPy's spare normal number, as ``Apart`` does."""
    _NUMPY.set_bit_generator(_NUMPY.get_bit_generator())
