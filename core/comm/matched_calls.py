"""Check that all processes make the same call: every process learns which others make another call or do not come."""

from __future__ import annotations

import collections
import json
import logging
import weakref
from typing import Any

import torch.distributed as dist

from ..rehearsing import rehearsing
from ..torch_private import default_store
from .collectives import get_rank, get_world_size
from .rendezvous import await_key

_logger = logging.getLogger("flextrain")

SILENT_S = 60.0
"""Seconds after which a waiting process logs that it waits; the others may still have work to do."""
_ASKING_S = 10.0
"""Seconds that a process has to make the list of the missing ranks for all; then the others make their own."""
_QUESTIONS_PER_S = 1000.0
"""How many questions of all waiting processes the store gets in a second, when they have waited for long."""

_numbers: weakref.WeakKeyDictionary[Any, collections.Counter[str]] = weakref.WeakKeyDictionary()


def roll_call(call: str, timeout_s: float) -> str | None:
    """Wait until every process has made this call. Return None, or a text that says which ranks did not.

    All processes make the same calls in the same order. Processes in different calls learn of it at once. A process
    that does not come is waited for at most ``timeout_s`` seconds; it is told if it comes later. Every process gets
    the result: dist.monitored_barrier reports on rank 0 only, and blocks the others for minutes.

    Args:
        call: name of the call, for messages.
    """
    if get_world_size() == 1 or rehearsing():
        return None
    counter = _numbers.setdefault(dist.group.WORLD, collections.Counter())
    counter["calls"] += 1
    try:
        return _Call(call, counter["calls"], get_rank(), get_world_size(), default_store()).wait(timeout_s)
    except RuntimeError as lost:
        return (
            f"the store of the job, which rank 0 or the launcher keeps, was lost ({' '.join(str(lost).split())[:200]})"
        )


class _Call:
    """One call of this process, to be matched with the calls of the same number on the other processes.

    A process sends a fixed number of requests to the store, besides asking again and again whether there is a verdict.
    A list of the missing ranks takes two requests for each rank of the job: one process makes it for all.

    Args:
        name: name of the call, for messages.
        number: how many calls this process has made.
        rank, world_size: of this process, and how many there are.
        store: the store of the job.
    """

    def __init__(self, name: str, number: int, rank: int, world_size: int, store: Any) -> None:
        self.name, self.number, self.rank, self.world_size, self.store = name, number, rank, world_size, store
        self._key = f"flextrain call {number}"
        self._verdict = f"{self._key} verdict"

    def wait(self, timeout_s: float) -> str | None:
        """Return the text for ``roll_call``: the first verdict that any process put into the store, for this rank."""
        store = self.store
        store.set(_whereabouts(self.rank), json.dumps([self.number, self.name]))
        first = json.loads(store.compare_set(self._key, "", json.dumps([self.rank, self.name])))
        if first[1] != self.name:
            self._decide("apart", [first, [self.rank, self.name]])
        elif store.add(f"{self._key} here", 1) == self.world_size:
            self._decide("together", [])
        if not self._is_decided(timeout_s):
            self._decide("late", [self.rank, self.name, timeout_s, *self._missing("end")])
        verdict, facts = json.loads(store.get(self._verdict))
        if verdict == "together":
            return None
        if verdict == "apart":
            others = [f"rank {rank} is in {name}" for rank, name in facts if name != self.name]
            return " and ".join(others)
        waiting, name, seconds, missing, seen = facts
        if self.rank in missing:
            return f"came too late, rank {waiting} waited in {name} for {seconds:g} s"
        ranks = ", ".join(map(str, missing))
        return f"rank {ranks} did not come within {seconds:g} s" + (f", last seen in {', '.join(seen)}" if seen else "")

    def _is_decided(self, timeout_s: float) -> bool:
        """Whether there is a verdict within ``timeout_s``; after SILENT_S seconds a warning names the missing ranks."""
        if self._await(self._verdict, min(timeout_s, SILENT_S)):
            return True
        if timeout_s > SILENT_S:
            ranks = ", ".join(map(str, self._missing("warning")[0]))
            _logger.warning("%s: waiting for rank %s, for %g s at most", self.name, ranks, timeout_s)
        return self._await(self._verdict, timeout_s - SILENT_S)

    def _await(self, key: str, timeout_s: float) -> bool:
        return await_key(self.store, key, timeout_s, self.world_size / _QUESTIONS_PER_S)

    def _missing(self, moment: str) -> tuple[list[int], list[str]]:
        """The ranks that have not come, and the calls in which they were last seen; the same for all that ask."""
        key = f"{self._key} missing at the {moment}"
        if self.store.add(f"{key}, asked", 1) == 1 or not self._await(key, _ASKING_S):
            last = {rank: self._last_call(rank) for rank in range(self.world_size)}
            late = {rank: call for rank, (number, call) in last.items() if number < self.number}
            self.store.set(key, json.dumps([list(late), list(dict.fromkeys(filter(None, late.values())))]))
        ranks, calls = json.loads(self.store.get(key))
        return ranks, calls

    def _decide(self, verdict: str, facts: list[Any]) -> None:
        """Put a verdict into the store for all processes; only the first one is kept."""
        self.store.compare_set(self._verdict, "", json.dumps([verdict, facts]))

    def _last_call(self, rank: int) -> tuple[int, str]:
        """Number and name of the last call of ``rank``; (0, "") if there is none."""
        if not self.store.check([_whereabouts(rank)]):
            return 0, ""
        number, name = json.loads(self.store.get(_whereabouts(rank)))
        return number, name


def _whereabouts(rank: int) -> str:
    return f"flextrain call of rank {rank}"
