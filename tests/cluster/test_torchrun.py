"""torchrun on two machines: a cut link, and a machine that is lost."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import ITERATIONS, JOB, Losses, first, lines_in, losses_in
from .machines import Machines

LIMIT_S = 240.0


def torchrun(nodes: Machines, tmp_path: Path, *arguments: object, nnodes: str = "2", max_restarts: int = 0, debian: bool = False) -> list[subprocess.Popen[str]]:  # fmt: skip
    """torchrun on both machines; the second one a moment later, so that the first becomes the first."""
    # Without keep_alive, a lost agent is noticed after 25 s; without last_call_timeout, a smaller group waits 30 s.
    conf = "join_timeout=120,last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"
    return [
        nodes.start(
            number, "torchrun", "--nnodes", nnodes, "--nproc-per-node", 1, "--max-restarts", max_restarts,
            "--rdzv-backend", "c10d", "--rdzv-endpoint", "node1:29400", "--rdzv-id", tmp_path.name, "--rdzv-conf", conf,
            JOB, "--work-dir", tmp_path, *arguments,
            log=tmp_path / f"node{number}.log", limit_s=LIMIT_S, debian=debian,
        )
        for number in nodes.numbers
    ]  # fmt: skip


def log_of(tmp_path: Path) -> str:
    return "".join((tmp_path / f"node{number}.log").read_text() for number in (1, 2))


def await_iteration(tmp_path: Path, number: int, job: subprocess.Popen[str]) -> None:
    """Return when both ranks have done this many updates."""
    while min(len(lines_in(tmp_path, rank)) for rank in range(2)) < number:
        assert job.poll() is None, log_of(tmp_path)[-4000:]
        time.sleep(0.05)


@pytest.mark.parametrize("debian", [False, True], ids=["", "own_name_is_loopback"])
def test_over_two_machines(nodes: Machines, reference: Callable[[str], Losses], tmp_path: Path, debian: bool) -> None:
    jobs = torchrun(nodes, tmp_path, debian=debian)
    assert [job.wait() for job in jobs] == [0, 0], log_of(tmp_path)[-4000:]
    assert losses_in(tmp_path) == first(reference("ddp"), 8)
    assert log_of(tmp_path).count("GLOO_SOCKET_IFNAME is set to eth0") == 2 * debian


def test_a_cut_link_ends_both_sides(nodes: Machines, tmp_path: Path) -> None:
    jobs = torchrun(nodes, tmp_path, "--iters", 1000, "--step", 0.1, "--timeout", 10)
    try:
        await_iteration(tmp_path, 5, jobs[0])
        nodes.cut(2)
        while (
            "ended by" not in (tmp_path / "node1.log").read_text()
            or "ended by" not in (tmp_path / "node2.log").read_text()
        ):
            assert any(job.poll() is None for job in jobs), log_of(tmp_path)[-4000:]
            time.sleep(0.1)
        jobs[0].wait()  # the second machine's agent looks for the first one's store for another minute
    finally:
        jobs[1].terminate()
        jobs[1].wait()
        nodes.mend(2)
    assert jobs[0].returncode != 0


def test_a_cut_link_is_named_on_both_sides(nodes: Machines, tmp_path: Path) -> None:
    """Long before the time limit of collectives: by rank, iteration and line, and with the status of a stall."""
    stall_s, options = 3, json.dumps(dict(watchdog=dict(stall_s=3)))
    jobs = torchrun(nodes, tmp_path, "--iters", 1000, "--step", 0.1, "--timeout", 200, "--env-cfg", options)
    logs = [tmp_path / f"node{number}.log" for number in nodes.numbers]
    try:
        await_iteration(tmp_path, 5, jobs[0])
        nodes.cut(2)
        while "exitcode" not in logs[0].read_text() or "stands still" not in logs[1].read_text():
            assert any(job.poll() is None for job in jobs), log_of(tmp_path)[-4000:]
            time.sleep(0.1)
    finally:
        jobs[1].terminate()  # this agent looks for the store of the other one
        jobs[1].wait()
        nodes.mend(2)
    jobs[0].wait()
    stopped, alone = (
        next(re.finditer(r"The run stands still for (\d+) s: (.*(?:\n  .*)?)", log.read_text())) for log in logs
    )
    assert re.search(r"^rank 1 \(process \d+ on node2\) does not answer\n  rank 0 waits for others in iteration \d+, in backward", stopped[2]), stopped  # fmt: skip
    keeper = "torchrun or its machine, which keep the job's store, have not answered for "
    assert re.search(rf"^{keeper}\d s; rank 1 is in iteration \d+ in backward", alone[2]), alone
    assert all(int(found[1]) <= stall_s + 5 for found in (stopped, alone))
    assert re.search(r"exitcode *: 75", logs[0].read_text())


def test_a_lost_machine_is_done_without(nodes: Machines, tmp_path: Path) -> None:
    """--nnodes 1:2: the run goes on with one process, from the last checkpoint, and repeats one interval at most."""
    interval = 10
    arguments = "--iters", ITERATIONS, "--step", 0.1, "--interval", interval, "--timeout", 20
    others = nodes.processes([2]).keys()  # a Slurm may run there
    jobs = torchrun(nodes, tmp_path, *arguments, nnodes="1:2", max_restarts=3)
    await_iteration(tmp_path, 25, jobs[0])
    nodes.kill(nodes.processes([2]).keys() - others)
    assert jobs[0].wait() == 0, log_of(tmp_path)[-4000:]
    jobs[1].wait()
    lines = lines_in(tmp_path, 0)
    again = next(i for i in range(1, len(lines)) if lines[i]["iter"] <= lines[i - 1]["iter"])
    before, after = lines[:again], lines[again:]
    assert [line["iter"] for line in before] == list(range(1, len(before) + 1))
    assert [line["iter"] for line in after] == list(range(int(after[0]["iter"]), ITERATIONS + 1))
    assert 0 <= before[-1]["iter"] - (after[0]["iter"] - 1) <= interval
    assert f"rank 0 of 1: done at {ITERATIONS}" in (tmp_path / "node1.log").read_text()
