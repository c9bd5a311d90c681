"""How the watchdog's threads end a process: the guard, one end for all, a killed process, and workers of data loaders."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flextrain.core.base.events import read_events
from flextrain.runner.data import sample_seeds as worker_stacks
from flextrain.runner.health import watchdog
from flextrain.runner.health import watchdog as guard
from flextrain.runner.health.exchange import Ending, Identity
from flextrain.runner.health.stalls import Beat, Whereabouts, ask_worker
from flextrain.runner.health.watchdog import Rounds

from .test_watchdog import Bulletin, report


def guarded(monkeypatch: pytest.MonkeyPatch, stop_after: int, **facts: Any) -> list[tuple[int, str]]:
    """With which status, and with what words, a guard ends its process; empty if it does not in some seconds.

    Args:
        stop_after: looks at the run after which the guard is stopped.
        facts: of the rounds and the run: ``rounds``, ``updates`` (whether they go on), ``lost``, ``is_first``.
    """
    said: list[str] = []
    ended: list[tuple[int, str]] = []
    done, numbers, looks = threading.Event(), itertools.count(), itertools.count(1)

    def leave(status: int) -> None:
        ended.append((status, said[-1]))
        done.set()

    class Silent:
        is_ending, exchange = False, SimpleNamespace(lost=facts.get("lost"))

        @property
        def number(self) -> int:
            return next(numbers) if facts.get("rounds") else 0

    class Run:
        rank, iter, work_dir = 1, 4, ""

    class Still:
        run = Run()

        def count(self) -> int:
            if (look := next(looks)) >= stop_after:
                done.set()
            return look if facts.get("updates") else 0

        def is_first(self) -> bool:
            return bool(facts.get("is_first"))

        def is_compiling(self) -> bool:
            return False

        def whereabouts(self) -> Whereabouts:
            return report(1, " in data, a.py:3", False, 4)

    monkeypatch.setattr(guard, "say", lambda run, text, stack: said.append(text))
    monkeypatch.setattr(guard, "append_event", lambda *given, **facts: None)
    monkeypatch.setattr(guard, "leave", leave)
    found = guard.Guard(Silent(), Still(), 0.08, 1000.0)  # type: ignore[arg-type]
    assert done.wait(60)
    found.stop()
    return ended


def test_the_guard_ends_a_process_whose_store_is_silent_when_training_is(monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = "rank 0 or its machine, which keep the job's store, "
    for facts, does in [({}, "have not answered for 0 s"), ({"lost": ValueError(), "rounds": True}, "has ended")]:
        ((status, text),) = guarded(monkeypatch, 10000, **facts)
        assert status == 75
        assert text == f"The run stands still for 0 s: {keeper}{does}; rank 1 is in iteration 5 in data, a.py:3"


@pytest.mark.parametrize(
    "facts",
    [{"updates": True}, {"updates": True, "lost": ValueError()}, {"rounds": True}, {"is_first": True}],
    ids=["training goes on", "also without a store", "the store answers", "before the first update"],
)
def test_the_guard_lets_a_process_alone_that_gets_on(monkeypatch: pytest.MonkeyPatch, facts: dict[str, Any]) -> None:
    assert guarded(monkeypatch, 40, **facts) == []


class FirstBulletin(Bulletin):
    pace_s = 0.0

    def put_first(self, key: str, text: str) -> str:
        return self.texts.setdefault(key, text)


class NoThread:
    bulletin = None

    def add(self, watcher: Any) -> None:
        self.watcher = watcher

    def wake(self) -> None: ...


def test_an_error_waits_for_the_end_that_the_watchdog_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a process whose connection broke because another one was ended leaves with another status."""
    watch = watchdog.Watchdog(NoThread(), None)
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        watch._rounds.is_ending = len(waited) < 3  # this process would end here

    monkeypatch.setattr(watchdog.time, "sleep", sleep)
    watch._rounds.is_ending = True
    assert watch.reason(RuntimeError("Connection closed by peer")) is None
    assert len(waited) == 3


@pytest.mark.parametrize("together", [False], ids=["one after the other has left"])
def test_all_get_the_same_answer_whether_all_have_failed(together: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "LOOK_S", 30.0 if together else 0.01)
    bulletin, answers = FirstBulletin(), list[bool]()

    def fail(rank: int) -> None:
        watch = watchdog.Watchdog(NoThread(), None)
        rounds: Any = watch._rounds
        rounds.watched = SimpleNamespace(number=3)
        rounds.exchange = SimpleNamespace(
            bulletin=bulletin, world_size=2, rank=rank, lost=None, ask=lambda question, patience_s, wake: question()
        )
        answers.extend([watch.all_have_failed(), watch.all_have_failed()])  # two hooks ask

    threads = [threading.Thread(target=fail, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
        if not together:
            thread.join(60)
    for thread in threads:
        thread.join(60)
    assert answers == [together] * 4


@pytest.mark.parametrize(("busy", "kind"), [(True, "killed"), (False, "finished")])
def test_a_process_that_has_ended_was_killed_or_had_finished(
    busy: bool, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = Identity(1, 4711, "node2")
    rounds = Rounds(NoThread(), None)
    announced: list[Ending] = []
    bulletin = Bulletin()
    bulletin.texts["beat 1"] = Beat(3, busy, False, False, 5).text()
    exchange: Any = SimpleNamespace(
        bulletin=bulletin,
        ended_beside=lambda near: [gone],
        first_ending=lambda run: None,
        announce=lambda run, ending: announced.append(ending) or ending,
        rank=0,
    )
    rounds.exchange = exchange
    watched: Any = SimpleNamespace(number=3, ending=None, run=SimpleNamespace(iter=7, work_dir=tmp_path))
    found = rounds.look(watched, near=1)
    assert found is not None
    assert [(ending.kind, ending.process, ending.iteration) for ending in announced] == [(kind, gone, 7)]
    assert watched.ending == found
    assert [event["rank"] for event in read_events(tmp_path) if event["event"] == "failed"] == [1] * busy


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_worker_that_is_stuck_says_where() -> None:
    """In the functions of a DataLoader's worker; one that was not prepared is not sent a signal, which would end it."""

    def _worker_loop(prepared: bool) -> None:
        if prepared:
            worker_stacks.answer()
        stuck()

    def stuck() -> None:
        os.write(begins, b"x")
        time.sleep(1000)

    for prepared in (True, False):
        begun, begins = os.pipe()
        if not (pid := os.fork()):
            try:
                _worker_loop(prepared)
            finally:
                os._exit(1)
        try:
            assert os.read(begun, 1)
            found = worker_stacks.source_in(worker_stacks.ask(pid, 30.0 if prepared else 0.1))
            assert (found and (found[0], found[2])) == ((__file__, "stuck") if prepared else None)
            said, stack = ask_worker(2, pid)
            assert said.startswith("worker 2, stuck, " if prepared else f"worker 2, process {pid}, does not answer")
            assert ("in stuck" in stack) == prepared
            assert "test_a_worker_that_is_stuck" not in stack  # the stack of the process that forked it
            os.kill(pid, 0)  # still there
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(begun)
            os.close(begins)
