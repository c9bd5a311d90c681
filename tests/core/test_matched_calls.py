"""How many requests a roll call sends to the store of the job, with threads as processes."""

from __future__ import annotations

import collections
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import HashStore

from flextrain.core.comm import agreement as matched_calls
from flextrain.core.comm.agreement import _Call


class CountingStore:
    """A store that counts the requests, and the bytes of all answers."""

    def __init__(self) -> None:
        self._store, self._lock = HashStore(), threading.Lock()
        self.requests: collections.Counter[str] = collections.Counter()
        self.bytes = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        def counted(*args: Any) -> Any:
            found = method(*args)
            with self._lock:
                self.requests[name] += 1
                self.bytes += len(found) if isinstance(found, bytes) else 0
            return found

        return counted


def call_roll(names: dict[int, str], world_size: int, timeout_s: float) -> tuple[dict[int, str | None], CountingStore]:
    """The answers of the ranks that come, and the store that they have asked."""
    store, here = CountingStore(), threading.Barrier(len(names))

    def come(rank: int, name: str) -> str | None:
        here.wait()
        return _Call(name, 1, rank, world_size, store).wait(timeout_s)

    with ThreadPoolExecutor(len(names)) as threads:
        waits = {rank: threads.submit(come, rank, name) for rank, name in names.items()}
        return {rank: wait.result() for rank, wait in waits.items()}, store


@pytest.mark.parametrize("world_size", [2, 16, 64])
def test_requests_grow_with_the_number_of_processes(world_size: int) -> None:
    answers, store = call_roll(dict.fromkeys(range(world_size), "save"), world_size, 60.0)
    assert set(answers.values()) == {None}
    own = {"set": 1, "add": 1, "get": 1, "compare_set": 1}
    last = {"compare_set": 1}  # says that all are here
    assert {name: store.requests[name] for name in own} == {
        name: world_size * count + last.get(name, 0) for name, count in own.items()
    }
    assert store.bytes < 100 * world_size


@pytest.mark.parametrize("world_size", [4, 32])
def test_one_process_asks_who_is_missing(monkeypatch: pytest.MonkeyPatch, world_size: int) -> None:
    monkeypatch.setattr(matched_calls, "SILENT_S", 0.3)
    present = dict.fromkeys(range(2, world_size), "save")
    answers, store = call_roll(present, world_size, 0.6)
    assert set(answers.values()) == {"rank 0, 1 did not come within 0.6 s"}
    assert store.requests["set"] <= len(present) + 2, "its whereabouts each, and both lists once"
    assert store.requests["get"] <= 3 * len(present) + 2 * len(present), (
        "both lists and the verdict each; all whereabouts"
    )
    assert store.requests["add"] <= 3 * len(present)


def test_one_whose_asker_is_lost_asks_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matched_calls, "_ASKING_S", 0.05)
    store = CountingStore()
    store.add("flextrain call 1 missing at the end, asked", 1)
    assert _Call("save", 1, 0, 2, store).wait(0.05) == "rank 1 did not come within 0.05 s"
