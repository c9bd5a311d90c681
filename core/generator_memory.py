"""Where the generators of Python, NumPy and torch stand, looked at in memory: in a tenth of the time of a copy of a state.

Where one keeps its words is found at import, by comparison with what the functions for it say, and a look is in use only
if it told all draws of a trial apart. Where it is not so, on another platform or in another version, those functions are
called. The layout was seen with Python 3.11, NumPy 2 and torch 2.15.
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
_HEAD = object.__basicsize__  # of a Python object; what its class keeps in C comes behind
_WORDS = 625  # of a Mersenne twister: its state and the place in it
_BYTES = 4 * _WORDS
# The place in a twister's words is looked at together with the words beside it, which are others when it comes round again.
_SEEN = 12

Look = Callable[[], Any]
"""Says where a generator stands, or several of them, to compare."""


def _view(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_char * size).from_address(address))


def _look_at(views: Sequence[memoryview]) -> Look:
    return partial(b"".join, views)


# Python


def _python_address() -> int | None:
    """Where Python's generator keeps its place and then 624 words; None for a Python that has them elsewhere."""
    probe = random.Random(1)
    if sys.implementation.name != "cpython" or random.Random.__basicsize__ < _HEAD + _BYTES:
        return None
    place, *words = (ctypes.c_uint32 * _WORDS).from_address(id(probe) + _HEAD)
    return id(_PYTHON) + _HEAD if (*words, place) == probe.getstate()[1] else None


_ADDRESS = _python_address()


def python_state() -> Any:
    """A copy of the state of Python's generator."""
    if _ADDRESS is None:
        return random.getstate()
    return ctypes.string_at(_ADDRESS, _BYTES), _PYTHON.gauss_next


def set_python_state(state: Any) -> None:
    """Have Python's generator go on from a copy."""
    if _ADDRESS is None:
        random.setstate(state)
    else:
        ctypes.memmove(_ADDRESS, state[0], _BYTES)
        _PYTHON.gauss_next = state[1]


# NumPy


def numpy_look(generator: np.random.MT19937) -> Look:
    """A function that says where the generator stands; the normal number that RandomState keeps is not in it."""
    address: int = generator.ctypes.state_address
    *words, place = (ctypes.c_uint32 * _WORDS).from_address(address)
    state: Any = generator.state["state"]
    if words == state["key"].tolist() and place == state["pos"]:
        return _look_at([_view(address + _BYTES - _SEEN, _SEEN)])  # here the place comes last
    return lambda: (generator.state["state"]["pos"], generator.state["state"]["key"].tobytes())


# torch

_BEFORE, _AFTER = 20, 28  # bytes beside the 624 words that hold the seed, the place, and the spare normal numbers
_WINDOW = 4096  # in which the words are looked for


def _state_bytes(generator: torch.Generator) -> bytes:
    state = generator.get_state()
    return ctypes.string_at(state.data_ptr(), state.numel())


def _read_safely(address: int, size: int) -> bytes:
    """What is in this process's memory, as far as there is any; nothing where that cannot be asked."""
    with (
        contextlib.suppress(OSError, OverflowError, ValueError),
        Path("/proc/self/mem").open("rb", buffering=0) as memory,
    ):
        memory.seek(address)
        return memory.read(size)
    return b""


def _words_address(generator: torch.Generator, read: Callable[[int, int], bytes]) -> int | None:
    """Where a generator's 624 words are; None if they are not found, or not with all beside them that is looked at."""
    if sys.implementation.name != "cpython" or torch.Generator.__basicsize__ < _HEAD + ctypes.sizeof(ctypes.c_void_p):
        return None
    # In a state of torch's every word takes 8 bytes; seed, what is left, whether it is seeded and the place take 24.
    state = np.frombuffer(_state_bytes(generator), np.uint64, (_WORDS - 1) + 3)
    words = state[3:].astype(np.uint32).tobytes()
    start = ctypes.c_void_p.from_address(id(generator) + _HEAD).value or 0
    found = read(start, _WINDOW)
    at = found.find(words)
    is_whole = at >= _BEFORE and at + len(words) + _AFTER <= len(found)
    return start + at if is_whole and found.count(words) == 1 else None


def _views_beside(address: int) -> list[memoryview]:
    """What tells draws apart beside the words at this address, with the first two of them."""
    return [_view(address - _BEFORE, _BEFORE + 8), _view(address + _BYTES - 4, _AFTER)]


def _torch_views(
    generator: torch.Generator, read: Callable[[int, int], bytes] = _read_safely
) -> list[memoryview] | None:
    """What to look at in memory; None where the same of another generator does not tell all draws apart."""
    probe = torch.Generator().manual_seed(1)
    tried, address = _words_address(probe, read), _words_address(generator, read)
    if tried is None or address is None or not _tells_draws(probe, _look_at(_views_beside(tried))):
        return None
    return _views_beside(address)


def _tells_draws(probe: torch.Generator, look: Look) -> bool:
    """Whether a look is another after any number has been drawn, and stays the same as long as none is."""
    seen = [look()]
    # Up to where the generator begins with new words, and beyond; the second number of a pair moves nothing else.
    for drawn in (1, 622, 1, 1, 623, 1, 624, 624):
        torch.rand(drawn, generator=probe)
        seen.append(look())
    for dtype in (torch.float32, torch.float32, torch.float64, torch.float64, torch.float32, torch.float64):
        torch.randn(1, dtype=dtype, generator=probe)
        seen.append(look())
    for seed in (2, 2 + 2**32):  # the words depend on 32 bits of it
        probe.manual_seed(seed)
        seen.append(look())
    probe.get_state()
    return len(set(seen)) == len(seen) and look() == seen[-1]


# Python and torch together


def look_at_both() -> Look:
    """A function that says where they stand, but for the normal number that Python keeps, which is in ``gauss_next``."""
    if _ADDRESS is None or _VIEWS is None:
        return lambda: (random.getstate(), _state_bytes(_TORCH))
    return _look_at([_view(_ADDRESS, _SEEN), *_VIEWS])


_VIEWS = _torch_views(_TORCH)
