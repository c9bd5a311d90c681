"""RNG of Python, NumPy and torch on the CPU: seed them, isolate code from them, and detect draws cheaply."""

from __future__ import annotations

import base64
import contextlib
import ctypes
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..comm.collectives import broadcast_object
from ..comm.topology import Topology
from ..device.device import DEVICES

# Read the positions of the generators of Python, NumPy and torch from memory, in a tenth of the time of a copy.
#
# The address of each generator's words is found at import, by comparison with the state that its public function
# returns. torch's memory is read only if a trial has told all draws apart. On other platforms and versions, where
# this fails, the public functions are called. The layout was checked with Python 3.11, NumPy 2 and torch 2.15.


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


_NUMPY: Any = np.random  # its annotations lack two functions that are public since NumPy 1.24

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


# RNG state of Python, NumPy, torch and the device: read it, encode it as text, restore it.


def torch_states(device: torch.device) -> dict[str, Tensor]:
    """RNG states of torch's generators that a model on ``device`` draws from: "torch" (CPU), and the device's type."""
    states = {"torch": torch.get_rng_state()}
    if device.type != "cpu":
        states[device.type] = DEVICES[device.type].module.get_rng_state(device)
    return states


def load_torch_states(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Restore what ``torch_states`` has returned."""
    torch.set_rng_state(states["torch"])
    if device.type != "cpu":
        DEVICES[device.type].module.set_rng_state(states[device.type], device)


def rng_state(device: torch.device) -> dict[str, Any]:
    """The RNG state of this process, including that of ``device``, as JSON-able values."""
    version, internal, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(internal), gauss],
        "numpy": [str(kind), keys.tolist(), int(position), int(has_gauss), float(cached)],  # type: ignore[union-attr]
        **{name: encode(state) for name, state in torch_states(device).items()},
    }


def load_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore a state from ``rng_state``; the state of another kind of device is ignored."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(decode(state["torch"]))
    if device.type != "cpu" and device.type in state:
        DEVICES[device.type].module.set_rng_state(decode(state[device.type]), device)


@contextmanager
def kept_random_state(device: torch.device) -> Iterator[None]:
    """Context after which Python, NumPy, torch and ``device`` draw as if nothing had been drawn inside."""
    python, legacy, states = random.getstate(), np.random.get_state(legacy=True), torch_states(device)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)
        load_torch_states(states, device)


@contextmanager
def drawing_from(state: Tensor) -> Iterator[None]:
    """Context in which torch draws on the CPU from ``state``; a process that had another state gets it back."""
    own = torch.get_rng_state()
    torch.set_rng_state(state)
    try:
        yield
    finally:
        if not torch.equal(own, state):
            torch.set_rng_state(own)


@contextmanager
def drawing_apart(state: Tensor) -> Iterator[None]:
    """Context in which torch draws on the CPU from ``state``, and after which it draws as if nothing had been drawn inside."""
    own = torch.get_rng_state()
    torch.set_rng_state(state)
    try:
        yield
    finally:
        torch.set_rng_state(own)


def encode(state: Tensor) -> str:
    """Encode a generator's state (uint8, 1-D) as text."""
    return base64.b64encode(state.cpu().numpy().tobytes()).decode("ascii")


def decode(text: str) -> Tensor:
    """Decode a state that ``encode`` has encoded."""
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


# Seed the random generators of a run: draw the run's seed, and derive the seed of each process.


def draw_seed() -> int:
    """A seed from the operating system, the same on every process; collective."""
    return broadcast_object(int.from_bytes(os.urandom(4), "little") & 0x7FFFFFFF)


def set_seed(
    seed: int | None = None,
    *,
    diff_rank_seed: bool = False,
    deterministic: bool = False,
    topology: Topology | None = None,
) -> int:
    """Seed Python, NumPy and torch (all devices); return the run's seed, which all processes share.

    Args:
        seed: None draws one from the operating system; the call is a collective then.
        diff_rank_seed: add the index of this process's shard of the data, so that dropout differs between the shards.
        deterministic: use deterministic kernels only; torch raises if an operation has none. If False, the settings are
            again those of before the first run in this process that used True.
        topology: the strategy's; default: every process has its own shard of the data.
    """
    run_seed = draw_seed() if seed is None else seed
    _seed(run_seed + (topology or Topology()).data.index if diff_rank_seed else run_seed)
    if deterministic or _before is not None:
        _use_deterministic(deterministic)
    return run_seed


_before: tuple[bool, bool, bool] | None = None
"""The program's settings of determinism, while those of a run that asked for it hold."""


def _use_deterministic(wanted: bool) -> None:
    """Use deterministic kernels only; without ``wanted``, as the program had it before a run in this process wanted that."""
    global _before
    cudnn = torch.backends.cudnn
    if wanted:
        if _before is None:
            algorithms = torch.are_deterministic_algorithms_enabled()
            _before = (algorithms, torch.is_deterministic_algorithms_warn_only_enabled(), cudnn.deterministic)
        cudnn.deterministic = True
        cudnn.benchmark = False
        # cuBLAS reads this variable when it creates its first handle; torch raises if it is missing.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    else:
        assert _before is not None, "a run before has asked for it"
        algorithms, warns, cudnn.deterministic = _before
        torch.use_deterministic_algorithms(algorithms, warn_only=warns)
        _before = None


def seed_process(*numbers: int) -> None:
    """Seed this process's generators from several numbers; different numbers give unrelated random streams.

    Source: ``numpy.random.SeedSequence`` derives the seed from the numbers.
    """
    _seed(int(np.random.SeedSequence([number % 2**64 for number in numbers]).generate_state(1)[0]))


def _seed(number: int) -> None:
    seed_alike(number)
    torch.manual_seed(number)  # on all devices
