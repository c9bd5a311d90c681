"""`flextrain run` on two machines, of which one joins later and is lost again."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flextrain.core.base.events import read_events

from .conftest import JOB, lines_in
from .machines import Machines

LIMIT_S, INTERVAL, ITERATIONS = 300.0, 20, 600


def start(nodes: Machines, number: int, tmp_path: Path) -> subprocess.Popen[str]:
    conf = "join_timeout=120,last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"
    return nodes.start(
        number, "flextrain", "run", "--nnodes", "1:2", "--rdzv-endpoint", "node1:29400", "--rdzv-id", tmp_path.name,
        "--rdzv-conf", conf, JOB, "--work-dir", tmp_path, "--iters", ITERATIONS, "--step", 0.1, "--interval", INTERVAL,
        "--timeout", 60, log=tmp_path / f"node{number}.log", limit_s=LIMIT_S,
    )  # fmt: skip


def wait(until: Callable[[], bool], job: subprocess.Popen[str], log: Path) -> None:
    while not until():
        assert job.poll() is None, log.read_text()[-4000:]
        time.sleep(0.1)


def started(tmp_path: Path) -> list[dict[str, Any]]:
    return [event for event in read_events(tmp_path) if event["event"] == "started"]


def test_a_machine_joins_and_is_lost(nodes: Machines, tmp_path: Path) -> None:
    log = tmp_path / "node1.log"
    first = start(nodes, 1, tmp_path)
    wait(lambda: len(lines_in(tmp_path, 0)) > INTERVAL, first, log)
    second = start(nodes, 2, tmp_path)
    wait(lambda: len(lines_in(tmp_path, 1)) > INTERVAL, first, log)
    nodes.kill(nodes.processes([2]))
    assert first.wait() == 0, log.read_text()[-4000:]
    second.wait()
    assert [event["processes"] for event in started(tmp_path)] == [1, 2, 1]
    lines = [int(line["iter"]) for line in lines_in(tmp_path, 0)]
    back = [i for i in range(1, len(lines)) if lines[i] != lines[i - 1] + 1]
    assert len(back) <= 2  # a start that repeats nothing leaves no trace
    assert all(0 < lines[i - 1] - lines[i] + 1 <= INTERVAL for i in back)
    assert lines[-1] == ITERATIONS
    agents = [event for event in read_events(tmp_path) if event.get("agent")]
    assert [event["event"] for event in agents] == ["launched", "restarted", "restarted", "ended"]
    assert agents[1]["reason"] == "the number of machines changed"
    assert "3 starts, 2 restarts; the last on 1 process of 1 machine, 600 iterations" in log.read_text()
