"""Processes find each other: time after time, late, after one tried alone, and never those of another job."""

from __future__ import annotations

import os
import re
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from flextrain.core.base.errors import FlexTrainError, LaunchError, StrategyError
from flextrain.core.comm import collectives as dist
from flextrain.core.comm import rendezvous
from flextrain.core.comm.rendezvous import await_key, store_of_group
from flextrain.strategies.launchers import saying_why_this_process_leaves
from flextrain.testing import WorkerGroup

pytestmark = pytest.mark.distributed


def join(init_method: str = "env://", timeout_s: float = 20, job: str = "") -> None:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=init_method, timeout_s=timeout_s, job=job)


def join_in_turn(init_method: str, late_s: float, agent: int | None = None) -> list[float]:
    """Sums over both processes of one group after another; another one is late each time, and may be by an hour."""
    if agent is not None:  # what torchrun sets, whose agent keeps the store
        os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", MASTER_PORT=str(agent))
    sums = []
    for turn in range(3):
        if int(os.environ["RANK"]) == turn % 2:
            time.sleep(late_s)
        join(init_method, timeout_s=3600)
        sums.append(dist.all_reduce(torch.tensor(dist.get_rank() + 1.0)).item())
        dist.destroy_process_group()
    return sums


@pytest.mark.parametrize("kind", ["torchrun", "env", "file"])
def test_groups_one_after_the_other(workers2: WorkerGroup, tmp_path: Path, kind: str) -> None:
    """With the addresses of the group before still in the store, whoever came first tried those for ever."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if kind == "torchrun" else None
    method = f"file://{tmp_path}/meet" if kind == "file" else "env://"
    assert workers2.run(join_in_turn, method, 0.3, store and store.port) == [[3.0, 3.0, 3.0]] * 2


def join_as_the_job_changes(agent: int, sizes: list[int]) -> list[float]:
    """Sums over the processes of one group after another; only the first ``size`` processes are in each."""
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", MASTER_PORT=str(agent))
    rank = int(os.environ["RANK"])
    sums = []
    for turn, size in enumerate(sizes):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(turn * rank)  # machines do not count alike
        if rank < size:
            dist.init_process_group("gloo", rank=rank, world_size=size, init_method="env://", timeout_s=20)
            sums.append(dist.all_reduce(torch.tensor(1.0)).item())
            dist.destroy_process_group()
    return sums


def test_groups_of_a_job_that_shrinks_and_grows(workers3: WorkerGroup) -> None:
    """The third process once took the addresses of the group of two for those of the next group of three."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    sums = workers3.run(join_as_the_job_changes, store.port, [3, 2, 2, 3])
    assert sums == [[3.0, 2.0, 2.0, 3.0]] * 2 + [[3.0, 3.0]]


def one_tries_alone() -> tuple[str, float]:
    message = ""
    if os.environ["RANK"] == "0":
        join()
        dist.destroy_process_group()
        try:
            join(timeout_s=0.5)
        except LaunchError as error:
            message = str(error)
    else:
        join()
        dist.destroy_process_group()
        time.sleep(1.5)
    join()
    return message, dist.all_reduce(torch.tensor(1.0)).item()


def test_one_that_tried_alone_says_so_and_meets_the_others_later(workers2: WorkerGroup) -> None:
    (message, first), (_, second) = workers2.run(one_tries_alone)
    assert first == second == 2.0
    assert message.startswith("launcher: rank 1 of 2 processes did not come to 127.0.0.1:")
    assert message.endswith(" within 0.5 s")


def nobody_comes() -> str:
    if os.environ["RANK"] == "1":
        return ""
    with pytest.raises(LaunchError) as caught:
        join(timeout_s=1)
    return str(caught.value)


def test_the_first_time_too(workers2: WorkerGroup) -> None:
    message, _ = workers2.run(nobody_comes)
    assert message.startswith("launcher: rank 0 did not find the others at 127.0.0.1:")
    assert "\n" not in message


def of_two_jobs(step: int, world_size: int) -> str:
    rank = int(os.environ["RANK"])
    if rank == 1:  # what belongs here is late
        time.sleep(0.3)
    mine = [("Slurm job 7 step 0", 2), (f"Slurm job 7 step {step}", world_size)][rank]
    rendezvous._open("env://", rank, mine[1], timeout_s=60)  # only the wait for the other one shall be short
    try:
        store_of_group("env://", rank=rank, world_size=mine[1], timeout_s=3, job=mine[0])
    except LaunchError as error:
        return str(error)
    return "joined"


@pytest.mark.parametrize(
    "step, world_size, its", [(1, 2, "step 1 of 2 processes"), (0, 3, "step 0 of 3 processes")], ids=["step", "size"]
)
def test_a_process_of_another_job_is_refused(workers2: WorkerGroup, step: int, world_size: int, its: str) -> None:
    first, second = workers2.run(of_two_jobs, step, world_size)
    both = f"is used by Slurm job 7 step 0 of 2 processes, this process belongs to Slurm job 7 {its}; set MASTER_PORT"
    assert both in second
    assert "rank 1 of 2 processes did not come" in first


def the_store_is_closed() -> str:
    if os.environ["RANK"] == "0":
        store = TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=True, wait_for_workers=False
        )
        store.set("flextrain/job", "2 ")
        await_key(store, "flextrain/of 2/groups/1", 60)
        return ""
    try:
        store_of_group("env://", rank=1, world_size=2, timeout_s=60)
    except LaunchError as error:
        return str(error)
    return "joined"


def test_one_that_waits_says_that_rank_0_gave_up(workers2: WorkerGroup) -> None:
    _, second = workers2.run(the_store_is_closed)
    assert re.fullmatch(
        r"launcher: 127\.0\.0\.1:\d+ was closed while rank 1 waited there, rank 0 has ended or no longer waits", second
    )


def rank_0_of_another_job(agent: int) -> str:
    """Two first processes: with the address of another job's machine, the second one comes into its store."""
    rank = os.environ["RANK"]
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", MASTER_PORT=str(agent))
    try:
        store_of_group("env://", rank=0, world_size=1, timeout_s=20, job=f"job {rank}")
    except LaunchError as error:
        return str(error)
    return ""


def test_rank_0_of_another_job_is_refused_too(workers2: WorkerGroup) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    [refusal] = filter(None, workers2.run(rank_0_of_another_job, store.port))
    assert re.search(r"is used by job (\d) of 1 process, this process belongs to job (?!\1)\d of 1 process;", refusal)


def restarted(agent: int) -> float:
    """As under torchrun, whose agent keeps the store when a machine is lost: rank 1 finds the token of 3 processes."""
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", MASTER_PORT=str(agent))
    if os.environ["RANK"] == "0":
        time.sleep(0.5)
    join(job="torchrun job 7")
    return dist.all_reduce(torch.tensor(1.0)).item()


def test_a_restart_with_fewer_processes_is_the_same_job(workers2: WorkerGroup) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("flextrain/job", "3 torchrun job 7")
    assert workers2.run(restarted, store.port) == [2.0, 2.0]


def leave(leaver: int) -> list[str]:
    """What each process hears, twice: one that is refused must not disturb the next attempt; then they meet."""
    rank, heard = int(os.environ["RANK"]), []
    for _ in range(2):
        try:
            if rank == leaver:
                with saying_why_this_process_leaves():
                    raise StrategyError("strategy.device: there is no cuda:1 here")
            join(timeout_s=3600)
        except FlexTrainError as error:
            heard.append(f"{type(error).__name__}: {error}")
    join()
    return [*heard, str(dist.all_reduce(torch.tensor(1.0)).item())]


@pytest.mark.parametrize("leaver", [0, 1])
def test_one_that_fails_before_the_group_exists_says_why(workers2: WorkerGroup, leaver: int) -> None:
    found = workers2.run(leave, leaver)
    own = "StrategyError: strategy.device: there is no cuda:1 here"
    assert found[leaver] == [own, own, "2.0"]
    assert found[1 - leaver] == [f"LaunchError: launcher: rank {leaver} has ended: {own}"] * 2 + ["2.0"]


def all_leave() -> str:
    with pytest.raises(StrategyError), saying_why_this_process_leaves():
        raise StrategyError("the same everywhere")
    join()
    return str(dist.all_reduce(torch.tensor(1.0)).item())


def test_all_that_leave_do_not_wait_for_each_other(workers2: WorkerGroup) -> None:
    assert workers2.run(all_leave) == ["2.0", "2.0"]


def reach(init_method: str, rank: int, **options: Any) -> str:
    with pytest.raises(LaunchError) as caught:
        store_of_group(init_method, rank=rank, world_size=2, timeout_s=3600, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(socket.gethostname(), "HERE")


def test_a_name_without_an_address_is_an_error_at_once() -> None:
    message = reach("tcp://no..such..host:29500", 1)
    assert message.startswith("launcher: MASTER_ADDR=no..such..host has no address on HERE (")
    assert message.endswith("), set MASTER_ADDR to a name or an address of rank 0's machine that all machines know")


def test_names_of_pods_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    asked: list[str] = []

    def know_later(host: str) -> list[str]:
        asked.append(host)
        if len(asked) < 3:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return ["192.0.2.1"]

    monkeypatch.setattr(rendezvous, "resolve", know_later)
    monkeypatch.setattr(rendezvous, "_NAME_NAP_S", 0.001)
    assert "rank 0 runs on HERE" in reach("tcp://job-worker-0-0:29500", 0, is_derived=True)
    assert len(asked) == 4  # the third time there is an answer; the fourth is whether it is this machine's


def test_rank_0_is_where_the_others_look_for_it() -> None:
    assert reach("tcp://192.0.2.1:29500", 0, is_derived=True) == (
        "launcher: rank 0 runs on HERE, and the others look for it at 192.0.2.1, set MASTER_ADDR to the address of rank "
        "0's machine"
    )


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        assert reach(f"tcp://127.0.0.1:{port}", 0) == (
            f"launcher: rank 0 did not find the others at tcp://127.0.0.1:{port}, another program of this machine uses the "
            "port, set MASTER_PORT to a free one"
        )


def test_the_timeout_is_kept_for_a_store_that_was_opened_with_another(workers2: WorkerGroup) -> None:
    assert workers2.run(timeouts) == [(7.0, 9.0)] * 2


def timeouts() -> tuple[float, ...]:
    found = []
    for timeout_s in (7, 9):
        join(timeout_s=timeout_s)
        found.append(torch.distributed.group.WORLD._get_backend(torch.device("cpu")).options._timeout)
        dist.destroy_process_group()
    return tuple(found_s / timedelta(seconds=1) for found_s in found)


def test_an_agent_that_has_ended_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its port may still be open, held by a process that it had started, and nobody answers there."""
    monkeypatch.setattr(rendezvous, "_AGENT_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for name, value in dict(TORCHELASTIC_USE_AGENT_STORE="True", MASTER_ADDR="127.0.0.1").items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("MASTER_PORT", str(silent.getsockname()[1]))
        with pytest.raises(
            LaunchError, match="rank 1 did not find the others at .*, the launcher has ended, or cannot be reached"
        ):
            store_of_group("env://", rank=1, world_size=2, timeout_s=3600)
    with pytest.raises(LaunchError, match="the launcher has ended, or cannot be reached"):
        store_of_group("env://", rank=1, world_size=2, timeout_s=3600)
