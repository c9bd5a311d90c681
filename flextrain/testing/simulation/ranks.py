"""simulate: run a function on many ranks in one process, which take turns."""

from __future__ import annotations

import collections
import inspect
import logging
import os
import random
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn

from ...core.base.errors import ConfigError
from ...core.base.registry import REGISTRIES
from ...core.comm.collectives import destroy_process_group
from ...core.comm.rendezvous import PROCESS_VARIABLES, each_process_has
from ...runner.runner import FlexibleRunner
from ..loop import assign_variables, environ
from .group import CallCounts, SharedGroup, SimulatedGroup
from .group_private import threads_as_ranks
from .turns import AbandonedError, Turns

# What a process has once, and each simulated rank needs for itself: kept when its turn ends, and put back when it
# begins.


LAUNCH_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SCRIPT = "__main__"
_NONE: Any = object()
each_process_has(FlexibleRunner, "__init__")
each_process_has(logging.getLogger("flextrain"), "handlers", "level", "propagate", "filters")
each_process_has(nn.Module, "register_parameter")  # a model that is built without memory replaces it
each_process_has(inspect.unwrap(torch.utils.checkpoint.checkpoint).__kwdefaults__, "context_fn")  # see repeating_in


class OwnState:
    """The state that changes hands with the turn. One object per simulation; a rank's state is what ``keep`` returns."""

    def __init__(self) -> None:
        self._slots: list[tuple[Callable[[], Any], Callable[[Any], None]]] = [
            (_generators, _set_generators),
            (_environment, assign_variables),
            (_script, _set_script),
            (torch.get_default_dtype, torch.set_default_dtype),
            _Registered().slot,
            (_variables, _set_variables),
        ]

    def keep(self) -> list[Any]:
        """What this rank has now."""
        return [get() for get, _ in self._slots]

    def put_back(self, kept: list[Any]) -> None:
        """Give this rank what it had."""
        for (_, put), value in zip(self._slots, kept, strict=True):
            put(value)


def _variables() -> list[Any]:
    return [variable.get() for variable in PROCESS_VARIABLES]


def _set_variables(values: list[Any]) -> None:
    """Put back the values; those that a rank's turn ended without, because it was before the import, are the initial ones."""
    for variable, value in zip_longest(PROCESS_VARIABLES, values, fillvalue=_NONE):
        variable.set(variable.initial if value is _NONE else value)


def _generators() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _set_generators(states: tuple[Any, ...]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def _environment() -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in LAUNCH_VARIABLES}


def _script() -> tuple[Any, ...]:
    return sys.modules[_SCRIPT], sys.argv, list(sys.path)


def _set_script(found: tuple[Any, ...]) -> None:
    sys.modules[_SCRIPT], sys.argv, sys.path[:] = found


class _Registered:
    """Names that a rank's script has registered; those of modules, which are imported once, are shared."""

    def __init__(self) -> None:
        self._names = [registry.module_dict for registry in REGISTRIES]
        self._shared = [-1] * len(self._names)

    @property
    def slot(self) -> tuple[Callable[[], Any], Callable[[Any], None]]:
        return self._take, self._put

    def _take(self) -> dict[int, dict[str, Any]]:
        taken: dict[int, dict[str, Any]] = {}
        for number, names in enumerate(self._names):
            if len(names) == self._shared[number]:
                continue
            own = {name: kind for name, kind in names.items() if getattr(kind, "__module__", "") == _SCRIPT}
            for name in own:
                del names[name]
            self._shared[number] = len(names)
            if own:
                taken[number] = own
        return taken

    def _put(self, taken: dict[int, dict[str, Any]]) -> None:
        for number, own in taken.items():
            self._names[number].update(own)


# SimulatedStore: the store of a job whose ranks are threads; it counts what each rank asks for.


class SimulatedStore(dist.Store):  # type: ignore[misc,name-defined,unused-ignore]
    """A store as torch's TCPStore has it; a rank that waits for a key lets other ranks run.

    Attributes:
        requests: number of requests, by rank.
    """

    def __init__(self, turns: Turns) -> None:
        super().__init__()
        self._turns = turns
        self._values: dict[str, bytes] = {}
        self.requests: collections.Counter[int] = collections.Counter()

    def clone(self) -> SimulatedStore:
        """The same store: its connections are all alike."""
        return self

    def set(self, key: str, value: Any) -> None:
        """Set a key."""
        self._asked(changes=True)
        self._values[key] = _as_bytes(value)

    def get(self, key: str) -> bytes:
        """The value of a key, once it is set."""
        self._asked()
        self._await([key])
        return self._values[key]

    def add(self, key: str, number: int) -> int:
        """Add to a number that begins with 0; with 0 it is only read, which other ranks may change first."""
        self._asked(changes=number != 0)
        if not number:
            self._turns.ask_again(f"a question for {key}")
        total = int(self._values.get(key, b"0")) + number
        self._values[key] = str(total).encode()
        return total

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """Set a key if it has the expected value, or none and "" is expected; return its value then."""
        self._asked(changes=True)
        found = self._values.get(key)
        if (found is None and not _as_bytes(expected)) or found == _as_bytes(expected):
            found = self._values[key] = _as_bytes(desired)
        return _as_bytes(expected) if found is None else found

    def append(self, key: str, value: Any) -> None:
        """Append to the value of a key."""
        self._asked(changes=True)
        self._values[key] = self._values.get(key, b"") + _as_bytes(value)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are set."""
        self._asked()
        if not all(key in self._values for key in keys):
            self._turns.ask_again(f"a question for {keys[0]}")
        return all(key in self._values for key in keys)

    def wait(self, keys: Sequence[str], timeout: Any = None) -> None:
        """Wait until all keys are set."""
        self._asked()
        self._await(keys)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of several keys, once they are set."""
        self._asked()
        self._await(keys)
        return [self._values[key] for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        """Set several keys."""
        self._asked(changes=True)
        self._values.update(zip(keys, map(_as_bytes, values), strict=True))

    def has_extended_api(self) -> bool:
        """True: there are ``append``, ``multi_get`` and ``multi_set``."""
        return True

    def deleteKey(self, key: str) -> bool:  # noqa: N802 - torch's name
        """Delete a key; return whether it was set."""
        self._asked(changes=True)
        return self._values.pop(key, None) is not None

    def getNumKeys(self) -> int:  # noqa: N802
        """Number of keys."""
        self._asked()
        return len(self._values)

    delete_key, num_keys = deleteKey, getNumKeys

    def _asked(self, changes: bool = False) -> None:
        self.requests[self._turns.number] += 1
        if changes:
            self._turns.happened()

    def _await(self, keys: Sequence[str]) -> None:
        self._turns.wait_until(lambda: all(key in self._values for key in keys), f"a wait for the store's {keys[0]}")


def _as_bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


T = TypeVar("T")


class Simulation:
    """One simulated job: its store, its process groups and its threads.

    Attributes:
        store: it counts the requests of each rank.
        counts: counts of collectives.
    """

    def __init__(self, world_size: int) -> None:
        if world_size < 1:
            raise ConfigError(f"world_size: {world_size} is not allowed, give 1 or more")
        self.world_size = world_size
        self._state = OwnState()
        self._turns = Turns(world_size, self._state.keep, self._state.put_back)
        self.store, self.counts = SimulatedStore(self._turns), CallCounts()
        self._shared: dict[tuple[str, tuple[int, ...]], SharedGroup] = {}
        self._results: list[Any] = [None] * world_size
        self._failures: list[BaseException] = []

    def run(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> list[T]:
        """The results of ``function`` on every rank, in their order; for one call.

        Raises:
            Exception: that of the rank that failed first.
            SimulationError: the ranks wait for each other, or make calls that do not fit together.
        """
        with _launched(self.world_size), threads_as_ranks(self._make_group, self.store):
            before = self._state.keep()
            self._state.put_back(before)
            threads = [
                threading.Thread(
                    target=self._be, args=(rank, before, function, args, kwargs), name=f"rank {rank}", daemon=True
                )
                for rank in range(self.world_size)
            ]
            for thread in threads:
                thread.start()
            self._turns.start()
            for thread in threads:
                thread.join()
            self._state.put_back(before)
        if self._failures:
            raise self._failures[0]
        return self._results

    def _be(self, rank: int, before: list[Any], function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """The life of a rank, in its thread."""
        self._turns.begin(rank)
        has_failed = False
        try:
            self._state.put_back(before)
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
            with torch.autograd.set_multithreading_enabled(False):
                self._results[rank] = function(*args, **kwargs)
        except AbandonedError:
            has_failed = True
        except BaseException as error:
            has_failed = True
            self._failures.append(error)
        try:
            destroy_process_group()
            self._state.keep()  # takes away what its script has registered
        finally:
            self._turns.end(has_failed)

    def _make_group(self, name: str, ranks: tuple[int, ...], rank: int, size: int) -> SimulatedGroup:
        shared = self._shared.setdefault((name, ranks), SharedGroup())
        return SimulatedGroup(name, rank, size, shared, self._turns, self.counts)


@contextmanager
def _launched(world_size: int) -> Iterator[None]:
    """Context with the variables that torchrun sets, and a port where somebody listens: ranks try it first."""
    size = str(world_size)
    with (
        socket.create_server(("127.0.0.1", 0), backlog=world_size) as server,
        environ(
            RANK="0",
            LOCAL_RANK="0",
            WORLD_SIZE=size,
            LOCAL_WORLD_SIZE=size,
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(server.getsockname()[1]),
            TORCHELASTIC_RUN_ID="simulation",
            TORCHELASTIC_USE_AGENT_STORE=None,
        ),
    ):
        yield


def simulate(world_size: int, function: Callable[..., T], *args: Any, **kwargs: Any) -> list[T]:
    """The results of ``function(*args, **kwargs)`` on ``world_size`` ranks, in their order, computed in this process.

    The ranks are threads, of which one runs at a time until it waits for others. Their process groups compute on the CPU
    what gloo computes. Each has its own generators of random numbers, ``RANK`` and ``__main__``; modules that the
    function imports, and their variables, are shared, unlike those of processes.

    Raises:
        Exception: that of the rank that failed first.
        SimulationError: the ranks wait for each other for ever, or make calls that do not fit together.
        StrategyError: this version of torch was not checked.
    """
    return Simulation(world_size).run(function, *args, **kwargs)
