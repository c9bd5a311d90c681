"""Processes find each other: time after time, late, after one tried alone, and never those of another job."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore

from flextrain.core.comm import collectives as dist
from flextrain.core.errors import LaunchError
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


def of_two_jobs() -> str:
    rank = os.environ["RANK"]
    if rank == "1":  # what belongs here is late
        time.sleep(0.3)
    try:
        join(job=f"Slurm job 7 step {rank}", timeout_s=2)
    except LaunchError as error:
        return str(error)
    return "joined"


def test_a_process_of_another_job_is_refused(workers2: WorkerGroup) -> None:
    first, second = workers2.run(of_two_jobs)
    assert "is used by Slurm job 7 step 0, this process belongs to Slurm job 7 step 1; set MASTER_PORT" in second
    assert "rank 1 of 2 processes did not come" in first


def test_the_timeout_is_kept_for_a_store_that_was_opened_with_another(workers2: WorkerGroup) -> None:
    assert workers2.run(timeouts) == [(7.0, 9.0)] * 2


def timeouts() -> tuple[float, ...]:
    found = []
    for timeout_s in (7, 9):
        join(timeout_s=timeout_s)
        found.append(torch.distributed.group.WORLD._get_backend(torch.device("cpu")).options._timeout)
        dist.destroy_process_group()
    return tuple(found_s / timedelta(seconds=1) for found_s in found)
