"""A random permutation of ``range(size)`` that computes any of its entries on demand, without storing it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Indices = np.ndarray[Any, np.dtype[np.int64]]
_ROUNDS = 8


def hashed(numbers: Any) -> Any:
    """Hash an array of uint64 in place, and return it: SplitMix64's finalizer without its last step, which moves no bit up."""
    numbers ^= numbers >> np.uint64(30)
    numbers *= np.uint64(0xBF58476D1CE4E5B9)
    numbers ^= numbers >> np.uint64(27)
    numbers *= np.uint64(0x94D049BB133111EB)
    return numbers


class Straight:
    """The identity permutation, with the interface of ``Shuffled``."""

    def __getitem__(self, positions: Indices) -> Indices:
        return positions


class Shuffled:
    """A random permutation of ``range(size)``: ``order[positions]`` computes the numbers at an array of positions.

    Source: a Feistel network over pairs of numbers below ``rows`` and ``columns``, whose product is ``size`` or a little
    more; a result of ``size`` or more is encrypted again. Black and Rogaway, Ciphers with Arbitrary Finite Domains
    (CT-RSA 2002), who use four rounds and a stronger function. The function here is ``hashed``.

    Args:
        size: how many numbers, at least 1.
        seeds: different seeds give unrelated permutations.
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
    """Round function: add a hash of the other half and the key to one half, modulo ``size``."""
    mixed = hashed(other ^ key)
    mixed >>= np.uint64(32)  # the better half; the finalizer's last step would only copy it into the other half
    mixed *= np.uint64(size)
    mixed >>= np.uint64(32)  # below size
    mixed += half
    mixed -= np.where(mixed >= size, np.uint64(size), np.uint64(0))
    return mixed
