"""A random order of many numbers that is computed where it is asked for, and kept nowhere."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Indices = np.ndarray[Any, np.dtype[np.int64]]
_ROUNDS = 8


class Straight:
    """The order of ``range``, asked like a random one."""

    def __getitem__(self, positions: Indices) -> Indices:
        return positions


class Shuffled:
    """A random order of ``range(size)``: ``order[positions]`` computes the numbers at an array of positions.

    Source: a Feistel network over pairs of numbers below ``rows`` and ``columns``, whose product is ``size`` or a little
    more; what comes out beyond ``size`` goes through again. Black and Rogaway, Ciphers with Arbitrary Finite Domains
    (CT-RSA 2002), there with four rounds and a stronger function. The function is SplitMix64's finalizer, as in
    ``core.generators.mix``.

    Args:
        size: how many numbers, at least 1.
        seeds: other ones give unrelated orders.
    """

    def __init__(self, size: int, *seeds: int) -> None:
        self.size = size
        self._rows = math.isqrt(size - 1) + 1
        self._columns = -(-size // self._rows)
        self._keys = np.random.SeedSequence([seed % 2**64 for seed in seeds]).generate_state(_ROUNDS, np.uint64)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, positions: Indices) -> Indices:
        numbers = self._encrypt(positions.astype(np.uint64))
        while (beyond := numbers >= self.size).any():
            numbers[beyond] = self._encrypt(numbers[beyond])
        found: Indices = numbers.astype(np.int64)
        return found

    def _encrypt(self, numbers: Any) -> Any:
        left, right = np.divmod(numbers, np.uint64(self._columns))
        for number, key in enumerate(self._keys):
            if number % 2:
                left = _shifted(left, right, key, self._rows)
            else:
                right = _shifted(right, left, key, self._columns)
        return left * np.uint64(self._columns) + right


def _shifted(half: Any, other: Any, key: Any, size: int) -> Any:
    """One half, shifted round its range by what the other half and the key make."""
    mixed = other ^ key
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed >>= np.uint64(32)  # its better half, which the last step of the finalizer would only copy into the other
    mixed *= np.uint64(size)
    mixed >>= np.uint64(32)  # below size
    mixed += half
    mixed -= np.where(mixed >= size, np.uint64(size), np.uint64(0))
    return mixed
