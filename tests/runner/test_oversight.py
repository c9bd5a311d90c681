"""Oversight: one thread per run, which calls watchers, shares a bulletin with other processes and ends with the run."""

from __future__ import annotations

import gc
import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from flextrain.core.comm import collectives as dist
from flextrain.runner.health.monitor import Monitor
from flextrain.runner.health.oversight import Oversight
from flextrain.testing import WorkerGroup

from ..waiting import wait_until
from .training import make_runner

pytestmark = pytest.mark.usefixtures("quick")


class Oversees(Oversight):
    """Leaves a word for the others, and collects theirs."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.heard: list[str | None] = []
        self.calls = 0
        self.add(self._watch)

    def _watch(self) -> None:
        self.calls += 1
        if self.bulletin is not None:
            self.bulletin.put(f"from {self.bulletin.rank}", "here")
            self.heard = self.bulletin.read(["from 0", "from 1"])


def threads() -> int:
    return sum(thread.name == "flextrain-monitor" for thread in threading.enumerate())


def oversee_two_runs(folder: Path) -> None:
    before = threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flextrain.runner.runner.Oversight", Oversees)
        runners: list[Any] = [make_runner(folder / name) for name in ("one", "two")]
    for runner in runners:
        wait_until(lambda runner=runner: runner.oversight.heard == ["here", "here"])  # type: ignore[misc]
    dist.barrier()
    for runner in runners:
        runner.strategy.leave()
    wait_until(lambda: threads() == before)


@pytest.mark.distributed
def test_watchers_talk_to_those_of_the_other_processes_until_the_group_is_left(
    tmp_path: Path, workers2: WorkerGroup
) -> None:
    workers2.run(oversee_two_runs, tmp_path)


def test_the_thread_ends_with_a_runner_that_nobody_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flextrain.runner.runner.Oversight", Oversees)
    gc.collect()  # runners of earlier tests, whose threads end then
    before = threads()
    runner: Any = make_runner(tmp_path)
    oversight = runner.oversight
    assert oversight.bulletin is None, "there is nobody to talk to"
    wait_until(lambda: oversight.calls)
    assert threads() == before + 1
    del runner
    gc.collect()
    wait_until(lambda: threads() <= before)


def make_one_without_watchers(folder: Path) -> None:
    before = threads()
    runner: Any = make_runner(folder)
    # What watched until all processes had met ends a moment later.
    wait_until(lambda: threads() == before, at_most_s=30.0)
    assert runner.oversight.monitor is None


@pytest.mark.processes
def test_without_watchers_there_is_no_thread(tmp_path: Path) -> None:
    # In a process of its own: tests before may have left runners, and in shared workers a time limit or a number of processes.
    with WorkerGroup(1) as group:
        group.run(make_one_without_watchers, tmp_path)


# The thread itself


def test_a_watcher_that_raises_is_called_no_more_and_the_others_are(caplog: pytest.LogCaptureFixture) -> None:
    calls, enough = [], threading.Event()

    def breaks() -> None:
        calls.append("breaks")
        raise ValueError("of its own")

    def goes_on() -> None:
        calls.append("goes on")
        if calls.count("goes on") == 3:
            enough.set()

    monitor = Monitor([breaks, goes_on], period_s=0.001)
    with caplog.at_level(logging.WARNING, "flextrain"):
        monitor.start()
        assert enough.wait(30)
    monitor.stop()
    assert calls.count("breaks") == 1
    assert "breaks ended by ValueError: of its own" in caplog.text
