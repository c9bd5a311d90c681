"""Read the positions of the generators of Python, NumPy and torch from memory, in a tenth of the time of a copy.

The address of each generator's words is found at import, by comparison with the state that its public function returns.
torch's memory is read only if a trial has told all draws apart. On other platforms and versions, where this fails, the
public functions are called. The layout was checked with Python 3.11, NumPy 2 and torch 2.15.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

_PYTHON: Any = random._inst  # behind the functions of `random`
_TORCH = torch.default_generator
_HEAD = object.__basicsize__  # size of a Python object's header; the C fields of its class follow
_WORDS = 625  # of a Mersenne twister: its 624 words and its position in them
_BYTES = 4 * _WORDS
# The position is read together with the words next to it: they differ when the position has the same value again.
_SEEN = 12

Look = Callable[[], Any]
"""Returns the position of one or several generators, to compare with a later one."""


def _view(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_char * size).from_address(address))


def _look_at(views: Sequence[memoryview]) -> Look:
    return partial(b"".join, views)


# Python


def _python_address() -> int | None:
    """Address of the position and the 624 words of Python's generator; None for a Python with another layout."""
    probe = random.Random(1)
    if sys.implementation.name != "cpython" or random.Random.__basicsize__ < _HEAD + _BYTES:
        return None
    position, *words = (ctypes.c_uint32 * _WORDS).from_address(id(probe) + _HEAD)
    return id(_PYTHON) + _HEAD if (*words, position) == probe.getstate()[1] else None


_ADDRESS = _python_address()


def python_state() -> Any:
    """A copy of the state of Python's generator."""
    if _ADDRESS is None:
        return random.getstate()
    return ctypes.string_at(_ADDRESS, _BYTES), _PYTHON.gauss_next


def set_python_state(state: Any) -> None:
    """Restore the state of Python's generator from a copy."""
    if _ADDRESS is None:
        random.setstate(state)
    else:
        ctypes.memmove(_ADDRESS, state[0], _BYTES)
        _PYTHON.gauss_next = state[1]


# NumPy


def numpy_look(generator: np.random.MT19937) -> Look:
    """Return a function that reads the generator's position, without RandomState's spare normal number."""
    address: int = generator.ctypes.state_address
    *words, position = (ctypes.c_uint32 * _WORDS).from_address(address)
    state: Any = generator.state["state"]
    if words == state["key"].tolist() and position == state["pos"]:
        return _look_at([_view(address + _BYTES - _SEEN, _SEEN)])  # here the position comes last
    return lambda: (generator.state["state"]["pos"], generator.state["state"]["key"].tobytes())


# torch

_BEFORE, _AFTER = 20, 28  # bytes next to the 624 words, with the seed, the position, and the spare normal numbers
_WINDOW = 4096  # bytes in which the words are searched for


def _state_bytes(generator: torch.Generator) -> bytes:
    state = generator.get_state()
    return ctypes.string_at(state.data_ptr(), state.numel())


def _read_safely(address: int, size: int) -> bytes:
    """The bytes at this address of the process's memory, as far as they are mapped; empty without /proc."""
    with (
        contextlib.suppress(OSError, OverflowError, ValueError),
        Path("/proc/self/mem").open("rb", buffering=0) as memory,
    ):
        memory.seek(address)
        return memory.read(size)
    return b""


def _words_address(generator: torch.Generator, read: Callable[[int, int], bytes]) -> int | None:
    """Address of a generator's 624 words; None if they are not found together with the bytes next to them."""
    if sys.implementation.name != "cpython" or torch.Generator.__basicsize__ < _HEAD + ctypes.sizeof(ctypes.c_void_p):
        return None
    # In torch's state every word takes 8 bytes, after 24 bytes of seed, words left, seeded flag and position.
    state = np.frombuffer(_state_bytes(generator), np.uint64, (_WORDS - 1) + 3)
    words = state[3:].astype(np.uint32).tobytes()
    start = ctypes.c_void_p.from_address(id(generator) + _HEAD).value or 0
    found = read(start, _WINDOW)
    at = found.find(words)
    is_whole = at >= _BEFORE and at + len(words) + _AFTER <= len(found)
    return start + at if is_whole and found.count(words) == 1 else None


def _views_beside(address: int) -> list[memoryview]:
    """Views of the bytes next to the words at this address, and of the first two words: every draw changes them."""
    return [_view(address - _BEFORE, _BEFORE + 8), _view(address + _BYTES - 4, _AFTER)]


def _torch_views(
    generator: torch.Generator, read: Callable[[int, int], bytes] = _read_safely
) -> list[memoryview] | None:
    """Views to read; None if the same views of a trial generator do not tell all draws apart."""
    probe = torch.Generator().manual_seed(1)
    tried, address = _words_address(probe, read), _words_address(generator, read)
    if tried is None or address is None or not _tells_draws(probe, _look_at(_views_beside(tried))):
        return None
    return _views_beside(address)


def _tells_draws(probe: torch.Generator, look: Look) -> bool:
    """Whether a look changes with every draw of ``probe``, and does not change without one."""
    seen = [look()]
    # These counts reach the end of the 624 words and pass it; the second of a normal pair changes only the spare.
    for drawn in (1, 622, 1, 1, 623, 1, 624, 624):
        torch.rand(drawn, generator=probe)
        seen.append(look())
    for dtype in (torch.float32, torch.float32, torch.float64, torch.float64, torch.float32, torch.float64):
        torch.randn(1, dtype=dtype, generator=probe)
        seen.append(look())
    for seed in (2, 2 + 2**32):  # the words depend on 32 bits of the seed only
        probe.manual_seed(seed)
        seen.append(look())
    probe.get_state()
    return len(set(seen)) == len(seen) and look() == seen[-1]


# Python and torch together


def look_at_both() -> Look:
    """Return a function that reads the position of both, without Python's spare normal number (``gauss_next``)."""
    if _ADDRESS is None or _VIEWS is None:
        return lambda: (random.getstate(), _state_bytes(_TORCH))
    return _look_at([_view(_ADDRESS, _SEEN), *_VIEWS])


_VIEWS = _torch_views(_TORCH)
