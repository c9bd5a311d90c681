"""Who started this process, and starting several from Python."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from flextrain.core.errors import ConfigError, LaunchError
from flextrain.strategies import detect_launch, launch
from flextrain.strategies.launch import Launch, first_host

TORCHRUN = dict(RANK="3", WORLD_SIZE="4", LOCAL_RANK="1", MASTER_ADDR="a", MASTER_PORT="1")
OLD_LAUNCH = dict(
    RANK="3", WORLD_SIZE="4", MASTER_ADDR="a", MASTER_PORT="1"
)  # torch.distributed.launch without LOCAL_RANK
BATCH = dict(SLURM_JOB_ID="12", SLURM_NTASKS="4", SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_NODELIST="gpu[07-09]")
STEP_2 = "Slurm job 12 step 2"
SRUN = BATCH | dict(
    SLURM_STEP_ID="2",
    SLURM_STEP_NUM_TASKS="4",
    SLURM_PROCID="3",
    SLURM_LOCALID="1",
    SLURM_STEP_NODELIST="gpu[08-09],x1",
)
ONE_TASK = SRUN | dict(SLURM_STEP_NUM_TASKS="1", SLURM_PROCID="0", SLURM_LOCALID="0")
MPI = dict(
    OMPI_COMM_WORLD_SIZE="4",
    OMPI_COMM_WORLD_RANK="3",
    OMPI_COMM_WORLD_LOCAL_RANK="3",
    OMPI_COMM_WORLD_LOCAL_SIZE="4",
)
MPI_TWO_HOSTS = MPI | dict(OMPI_COMM_WORLD_LOCAL_RANK="1", OMPI_COMM_WORLD_LOCAL_SIZE="2")
NOBODY = Launch("none", 0, 1, 0, "env://")


@pytest.mark.parametrize(
    "launcher, env, found",
    [
        (None, {}, NOBODY),
        ("none", {}, NOBODY),
        (None, TORCHRUN, Launch("pytorch", 3, 4, 1, "env://")),
        ("pytorch", TORCHRUN, Launch("pytorch", 3, 4, 1, "env://")),
        (None, OLD_LAUNCH, Launch("pytorch", 3, 4, 3, "env://")),
        (None, SRUN | TORCHRUN, Launch("pytorch", 3, 4, 1, "env://")),  # torchrun started by srun
        (None, SRUN, Launch("slurm", 3, 4, 1, "tcp://gpu08:21214", STEP_2)),
        ("slurm", SRUN, Launch("slurm", 3, 4, 1, "tcp://gpu08:21214", STEP_2)),
        ("slurm", SRUN | dict(MASTER_ADDR="b", MASTER_PORT="7"), Launch("slurm", 3, 4, 1, "tcp://b:7", STEP_2)),
        ("slurm", {k: v for k, v in SRUN.items() if k != "SLURM_NTASKS"}, Launch("slurm", 3, 4, 1, "tcp://gpu08:21214", STEP_2)),
        (None, BATCH, NOBODY),  # tasks that nobody has started
        (None, ONE_TASK, NOBODY),
        ("slurm", ONE_TASK, Launch("slurm", 0, 1, 0, "tcp://gpu08:21214", STEP_2)),
        (None, MPI, Launch("mpi", 3, 4, 3, "tcp://127.0.0.1:29500")),
        ("mpi", MPI_TWO_HOSTS | dict(MASTER_ADDR="a"), Launch("mpi", 3, 4, 1, "tcp://a:29500")),
        (None, MPI | dict(PMIX_NAMESPACE="prte-a-77@1"), Launch("mpi", 3, 4, 3, "tcp://127.0.0.1:29816", "Open MPI job prte-a-77@1")),
        (None, MPI | dict(OMPI_MCA_ess_base_jobid="77"), Launch("mpi", 3, 4, 3, "tcp://127.0.0.1:21956", "Open MPI job 77")),
        (None, dict(OMPI_COMM_WORLD_SIZE="1"), NOBODY),
        (None, dict(WORLD_SIZE="1", LOCAL_RANK="0"), NOBODY),
        ("none", dict(WORLD_SIZE="2", PMI_SIZE="2"), NOBODY),
    ],
)  # fmt: skip
def test_detect(launcher: str | None, env: dict[str, str], found: Launch) -> None:
    assert detect_launch(launcher, env) == found


@pytest.mark.parametrize(
    "launcher, env, error, message",
    [
        ("pytroch", {}, ConfigError, 'launcher: "pytroch" is not allowed, choose none, pytorch, slurm or mpi, did you mean "pytorch"?'),
        ("none", TORCHRUN, LaunchError, 'launcher: "none" was given and torchrun started 4 processes, leave launcher out'),
        ("pytorch", {}, LaunchError, "launcher: environment variable RANK is not set, was the script started by the launcher?"),
        ("pytorch", dict(RANK="0"), LaunchError, "launcher: environment variable WORLD_SIZE is not set"),
        (None, TORCHRUN | dict(RANK="x"), LaunchError, 'launcher: environment variable RANK="x" is no whole number'),
        ("slurm", {}, LaunchError, "launcher: environment variable SLURM_STEP_NUM_TASKS is not set"),
        ("slurm", BATCH, LaunchError, "launcher: environment variable SLURM_STEP_NUM_TASKS is not set"),
        ("slurm", dict(SLURM_STEP_NUM_TASKS="2", SLURM_PROCID="0"), LaunchError, "launcher: environment variable SLURM_STEP_NODELIST is not set"),
        ("mpi", {}, LaunchError, "launcher: environment variable OMPI_COMM_WORLD_SIZE is not set"),
        (None, MPI_TWO_HOSTS, LaunchError, "launcher: Open MPI runs on several machines, set MASTER_ADDR"),
        (None, dict(RANK="0"), LaunchError, "launcher: RANK=0 is set and WORLD_SIZE is not; start the script with torchrun"),
        (None, dict(WORLD_SIZE="2"), LaunchError, "launcher: WORLD_SIZE=2 is set and RANK is not; start the script with torchrun"),
        (None, dict(LOCAL_RANK="1"), LaunchError, "launcher: LOCAL_RANK=1 is set and RANK is not; start the script with torchrun"),
        (None, dict(PMI_SIZE="4", PMI_RANK="2"), LaunchError, "launcher: PMI_SIZE=4 says that MPICH or Intel MPI started several processes"),
        (None, TORCHRUN | dict(RANK="4"), LaunchError, "launcher: RANK=4, LOCAL_RANK=1 and WORLD_SIZE=4 do not fit"),
        (None, TORCHRUN | dict(WORLD_SIZE="0"), LaunchError, "launcher: RANK=3, LOCAL_RANK=1 and WORLD_SIZE=0 do not fit"),
        (None, TORCHRUN | dict(MASTER_ADDR=""), LaunchError, "launcher: MASTER_ADDR must be set for 4 processes"),
        (None, TORCHRUN | dict(MASTER_PORT="x"), LaunchError, 'launcher: environment variable MASTER_PORT="x" is no whole number'),
    ],
)  # fmt: skip
def test_what_is_missing_is_named(launcher: str | None, env: dict[str, str], error: type, message: str) -> None:
    with pytest.raises(error) as caught:
        detect_launch(launcher, env)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_the_environment_of_this_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert detect_launch().rank == 3


@pytest.mark.parametrize(
    "nodes, host",
    [
        ("gpu07", "gpu07"),
        ("node-1,node-2", "node-1"),
        ("gpu[07-09,12],cpu1", "gpu07"),
        ("gpu[3,5]", "gpu3"),
        ("gpu[01-04]-ib", "gpu01-ib"),
        ("rack[1-2]node[03-04]", "rack1node03"),
        ("a.b.c", "a.b.c"),
    ],
)
def test_first_host(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


@pytest.mark.parametrize("nodes", ["", "[", "gpu[01", ","])
def test_a_list_that_nobody_writes(nodes: str) -> None:
    with pytest.raises(LaunchError, match="cannot read a machine from SLURM_STEP_NODELIST=.*, set MASTER_ADDR"):
        first_host(nodes)


def test_jobs_and_steps_on_one_machine_have_ports_of_their_own() -> None:
    steps = [
        SRUN | dict(SLURM_JOB_ID=str(job), SLURM_STEP_ID=str(step)) for job in range(100, 120) for step in range(50)
    ]
    assert len({detect_launch(env=env).init_method for env in steps}) == len(steps)
    jobs = [MPI | dict(PMIX_NAMESPACE=f"prte-host-{pid}@1") for pid in range(4000, 4010)]
    assert len({detect_launch(env=env).init_method for env in jobs}) == len(jobs)


# Starting

JOB = """
import os
import torch
from flextrain import DDPStrategy

def train(start, *, step):
    strategy = DDPStrategy(device="cpu")
    strategy.setup(torch.nn.Linear(1, 1))
    total = torch.tensor([start + step * strategy.rank])
    torch.distributed.all_reduce(total)
    facts = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")}
    strategy.teardown()
    return total.item(), strategy.launch.launcher, torch.get_num_threads(), facts

def fail():
    if os.environ["RANK"] == "1":
        raise KeyError("what went wrong")
    torch.distributed.init_process_group("gloo")  # waits for the other
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module that other processes can import."""
    (tmp_path / "job_for_launch.py").write_text(JOB)
    monkeypatch.syspath_prepend(tmp_path)
    import job_for_launch

    return job_for_launch


@pytest.mark.distributed
def test_processes_meet_and_rank_0_answers(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    total, launcher, num_threads, facts = launch(job.train, 2, 5, step=10)
    assert (total, launcher) == (20, "pytorch")
    assert num_threads == max(1, (os.cpu_count() or 1) // 2)
    assert facts == dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    assert "RANK" not in os.environ


@pytest.mark.distributed
def test_a_failing_process_is_named_with_its_traceback(job: Any) -> None:
    with pytest.raises(LaunchError) as caught:
        launch(job.fail, 2)
    assert str(caught.value).startswith("process 1 of 2 failed: ")
    assert "in fail" in str(caught.value)
    assert "KeyError: 'what went wrong'" in str(caught.value)


@pytest.mark.distributed
def test_fork_takes_functions_that_cannot_be_imported() -> None:
    threads = torch.get_num_threads()
    assert launch(lambda text: text + os.environ["RANK"], 2, "rank ", start_method="fork") == "rank 0"
    assert torch.get_num_threads() == threads
    with pytest.raises(LaunchError, match=r"process \d of 2 failed: .*exit code 3"):
        launch(lambda: os._exit(3), 2, start_method="fork")


def test_spawn_says_what_it_needs() -> None:
    with pytest.raises(LaunchError, match='^fn: cannot be sent to another process, .*, or give start_method="fork"$'):
        launch(lambda: None, 2)


def test_at_least_one_process() -> None:
    with pytest.raises(ConfigError, match="^nprocs: 0 is not allowed, give 1 or more$"):
        launch(print, 0)
