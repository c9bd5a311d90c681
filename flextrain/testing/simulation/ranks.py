"""simulate: run a function on many ranks in one process, which take turns."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from ...core.comm.collectives import destroy_process_group
from ...core.errors import ConfigError
from ...core.group_private import threads_as_ranks
from ..loop import environ
from .group import CallCounts, SharedGroup, SimulatedGroup
from .own_state import OwnState
from .store import SimulatedStore
from .turns import AbandonedError, Turns

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
