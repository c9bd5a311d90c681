"""Who started this process: variables as real launchers set them (tests/cluster runs the launchers themselves)."""

from __future__ import annotations

from pathlib import Path

import pytest

from flextrain.core.base.errors import ConfigError, LaunchError
from flextrain.strategies import detect_launch
from flextrain.strategies import launchers as mpi
from flextrain.strategies.launchers import Launch, first_host

TORCHRUN = dict(
    RANK="3", WORLD_SIZE="4", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2", MASTER_ADDR="a", MASTER_PORT="1",
    TORCHELASTIC_RUN_ID="none",
)  # fmt: skip
# torch.distributed.launch without LOCAL_RANK, and scripts that set the variables themselves
OLD_LAUNCH = dict(RANK="3", WORLD_SIZE="4", MASTER_ADDR="a", MASTER_PORT="1")
POD = OLD_LAUNCH | dict(KUBERNETES_SERVICE_HOST="10.0.0.1")
BATCH = dict(SLURM_JOB_ID="12", SLURM_NTASKS="4", SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_NODELIST="gpu[07-09]")
SRUN = BATCH | dict(
    SLURM_STEP_ID="2",
    SLURM_STEP_NUM_TASKS="4",
    SLURM_STEP_NUM_NODES="2",
    SLURM_PROCID="3",
    SLURM_LOCALID="1",
    SLURM_STEP_NODELIST="gpu[08-09],x1",
)
ONE_TASK = SRUN | dict(SLURM_STEP_NUM_TASKS="1", SLURM_PROCID="0", SLURM_LOCALID="0")
OPEN_MPI = dict(
    OMPI_COMM_WORLD_SIZE="4",
    OMPI_COMM_WORLD_RANK="3",
    OMPI_COMM_WORLD_LOCAL_RANK="3",
    OMPI_COMM_WORLD_LOCAL_SIZE="4",
)
TWO_HOSTS = OPEN_MPI | dict(OMPI_COMM_WORLD_LOCAL_RANK="1", OMPI_COMM_WORLD_LOCAL_SIZE="2")
HNP = dict(
    PMIX_NAMESPACE="955318273",
    OMPI_MCA_orte_hnp_uri="955318272.0;tcp://10.77.0.1,10.78.0.1:39643;tcp6://[fd00::2]:41087",
)
HYDRA = dict(PMI_SIZE="4", PMI_RANK="3", MPI_LOCALRANKID="3", MPI_LOCALNRANKS="4")
HYDRA_TWO_HOSTS = HYDRA | dict(MPI_LOCALRANKID="1", MPI_LOCALNRANKS="2")
# mpiexec and mpirun start a process of their own per machine with srun, of which their ranks have the variables.
UNDER_SRUN = dict(
    SLURM_STEP_ID="1", SLURM_STEP_NUM_TASKS="2", SLURM_STEP_NUM_NODES="2", SLURM_PROCID="1", SLURM_LOCALID="0"
)
NOBODY = Launch("none", 0, 1, 0, "env://")


def plain(local: int, job: str = "", several: bool = True, *, ends: bool = True) -> Launch:
    return Launch("pytorch", 3, 4, local, job=job, several_machines=several, ends_together=ends)


def step(address: str, job: str = "Slurm job 12 step 2", several: bool = True, *, derived: bool = False) -> Launch:
    return Launch("slurm", 3, 4, 1, f"tcp://{address}", job, several, derived)


def by_mpi(local: int, address: str, job: str = "", several: bool = False, *, derived: bool = True) -> Launch:
    return Launch("mpi", 3, 4, local, f"tcp://{address}", job, several, derived, ends_together=True)


@pytest.mark.parametrize(
    "launcher, env, found",
    [
        (None, {}, NOBODY),
        ("none", {}, NOBODY),
        (None, TORCHRUN, plain(1)),
        ("pytorch", TORCHRUN, plain(1)),
        (None, TORCHRUN | dict(LOCAL_WORLD_SIZE="4"), plain(1, several=False)),
        (None, TORCHRUN | dict(TORCHELASTIC_RUN_ID="7f3"), plain(1, "torchrun job 7f3")),
        (None, OLD_LAUNCH, plain(3, ends=False)),
        (None, OLD_LAUNCH | dict(MASTER_ADDR="127.0.0.1"), plain(3, several=False, ends=False)),
        (None, POD, plain(0, ends=False)),
        (None, SRUN | TORCHRUN, plain(1)),  # torchrun started by srun
        (None, OPEN_MPI | TORCHRUN, plain(1)),
        (None, SRUN, step("gpu08:21214", derived=True)),
        ("slurm", SRUN, step("gpu08:21214", derived=True)),
        ("slurm", SRUN | dict(MASTER_ADDR="b", MASTER_PORT="7"), step("b:7")),
        ("slurm", SRUN | dict(MASTER_ADDR="fd00::2", MASTER_PORT="7"), step("[fd00::2]:7")),
        ("slurm", {k: v for k, v in SRUN.items() if k != "SLURM_NTASKS"}, step("gpu08:21214", derived=True)),
        (None, SRUN | dict(SLURM_STEP_NUM_NODES="1"), step("127.0.0.1:21214", several=False, derived=True)),
        (None, SRUN | dict(SLURM_RESTART_COUNT="2"), step("gpu08:21214", "Slurm job 12 step 2, restart 2", derived=True)),
        (None, SRUN | dict(PMI_SIZE="4", PMI_RANK="3"), step("gpu08:21214", derived=True)),  # srun --mpi=pmi2
        (None, SRUN | dict(PMIX_RANK="3"), step("gpu08:21214", derived=True)),  # srun --mpi=pmix
        (None, BATCH, NOBODY),  # tasks that nobody has started
        (None, ONE_TASK, NOBODY),
        ("slurm", ONE_TASK, Launch("slurm", 0, 1, 0, "tcp://gpu08:21214", "Slurm job 12 step 2", True, True)),
        (None, OPEN_MPI, by_mpi(3, "127.0.0.1:29500")),
        ("mpi", TWO_HOSTS | dict(MASTER_ADDR="a"), by_mpi(1, "a:29500", several=True, derived=False)),
        (None, OPEN_MPI | HNP, by_mpi(3, "127.0.0.1:28152", "Open MPI job 955318273")),
        (None, TWO_HOSTS | HNP, by_mpi(1, "10.77.0.1:28152", "Open MPI job 955318273", several=True)),
        (None, TWO_HOSTS | dict(PMIX_NAMESPACE="prterun-gpu-7-77@1"), by_mpi(1, "gpu-7:26081", "Open MPI job prterun-gpu-7-77@1", several=True)),
        (None, OPEN_MPI | dict(OMPI_MCA_ess_base_jobid="77"), by_mpi(3, "127.0.0.1:29857", "Open MPI job 77")),
        (None, TWO_HOSTS | HNP | UNDER_SRUN, by_mpi(1, "10.77.0.1:28152", "Open MPI job 955318273", several=True)),
        (None, HYDRA, by_mpi(3, "127.0.0.1:29500")),
        ("mpi", HYDRA, by_mpi(3, "127.0.0.1:29500")),
        (None, HYDRA | dict(I_MPI_HYDRA_UUID="a-7"), by_mpi(3, "127.0.0.1:27844", "Intel MPI job a-7")),
        (None, HYDRA_TWO_HOSTS | dict(MASTER_ADDR="a", MASTER_PORT="7"), by_mpi(1, "a:7", several=True, derived=False)),
        (None, BATCH | UNDER_SRUN | HYDRA_TWO_HOSTS | dict(MASTER_ADDR="a"), by_mpi(1, "a:29500", several=True, derived=False)),
        (None, dict(OMPI_COMM_WORLD_SIZE="1", PMIX_RANK="0"), NOBODY),
        (None, dict(PMI_SIZE="1", PMI_RANK="0", MPI_LOCALRANKID="0", MPI_LOCALNRANKS="1"), NOBODY),
        (None, dict(WORLD_SIZE="1", LOCAL_RANK="0"), NOBODY),
        ("none", dict(WORLD_SIZE="2", PMI_SIZE="2", PMIX_RANK="1"), NOBODY),
    ],
)  # fmt: skip
def test_detect(launcher: str | None, env: dict[str, str], found: Launch) -> None:
    assert detect_launch(launcher, env) == found


MEET = "launcher: mpirun runs on several machines and does not say where the first one is, set MASTER_ADDR"


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
        ("slurm", {k: v for k, v in SRUN.items() if "NODELIST" not in k}, LaunchError, "launcher: environment variable SLURM_STEP_NODELIST is not set"),
        ("slurm", SRUN | dict(SLURM_PROCID="4"), LaunchError, "launcher: SLURM_PROCID=4, SLURM_LOCALID=1 and SLURM_STEP_NUM_TASKS=4 do not fit"),
        ("mpi", {}, LaunchError, "launcher: environment variable OMPI_COMM_WORLD_SIZE is not set"),
        (None, TWO_HOSTS, LaunchError, MEET),
        (None, HYDRA_TWO_HOSTS, LaunchError, MEET),
        (None, HYDRA | dict(PMI_RANK="4"), LaunchError, "launcher: PMI_RANK=4, MPI_LOCALRANKID=3 and PMI_SIZE=4 do not fit, ranks go from 0 to PMI_SIZE - 1; start"),
        (None, dict(RANK="0"), LaunchError, "launcher: RANK=0 is set and WORLD_SIZE is not; start the script with torchrun"),
        (None, dict(WORLD_SIZE="2"), LaunchError, "launcher: WORLD_SIZE=2 is set and RANK is not; start the script with torchrun"),
        (None, dict(LOCAL_RANK="1"), LaunchError, "launcher: LOCAL_RANK=1 is set and RANK is not; start the script with torchrun"),
        (None, dict(PMI_SIZE="4", PMI_RANK="2"), LaunchError, "launcher: PMI_SIZE=4 says that several processes were started, by a launcher that is not known here"),
        (None, dict(HOROVOD_SIZE="2", HOROVOD_RANK="1"), LaunchError, "launcher: HOROVOD_SIZE=2 says that horovodrun started several processes with gloo"),
        (None, dict(PMIX_RANK="2"), LaunchError, "launcher: PMIX_RANK=2 says that several processes were started, by a launcher that is not known here"),
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


def test_mpichs_machine_and_job_are_on_the_command_line_of_its_own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi, "_hydras_options", lambda here: {"control-port": "gpu-7:37323"})
    found = detect_launch(env=HYDRA_TWO_HOSTS)
    assert (found.init_method.rpartition(":")[0], found.job) == ("tcp://gpu-7", "MPICH job gpu-7:37323")
    assert detect_launch(env=HYDRA).init_method.startswith("tcp://127.0.0.1:")
    monkeypatch.setattr(mpi, "_hydras_options", lambda here: {"upstream-host": "gpu-7"})
    found = detect_launch(env=HYDRA_TWO_HOSTS | dict(I_MPI_HYDRA_UUID="a"))
    assert (found.init_method.rpartition(":")[0], found.job) == ("tcp://gpu-7", "Intel MPI job a")


def test_intels_machines_beyond_its_trees_width_do_not_know_the_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi, "_hydras_options", lambda here: {"upstream-host": "gpu-7"})
    with pytest.raises(LaunchError, match=f"^{MEET}"):
        detect_launch(env=HYDRA_TWO_HOSTS | dict(I_MPI_HYDRA_UUID="a", HYDRA_BSTRAP_TREE_WIDTH="1"))


def test_tasks_in_an_order_of_the_users_own(tmp_path: Path) -> None:
    file = tmp_path / "machines"
    file.write_text("x1\ngpu08\n")
    arbitrary = SRUN | dict(SLURM_DISTRIBUTION="arbitrary")
    assert detect_launch(env=arbitrary | dict(SLURM_HOSTFILE=str(file))).init_method == "tcp://x1:21214"
    assert detect_launch(env=arbitrary | dict(MASTER_ADDR="b")).init_method == "tcp://b:21214"
    with pytest.raises(
        LaunchError, match="^launcher: srun --distribution=arbitrary does not say where task 0 is, set MASTER"
    ):
        detect_launch(env=arbitrary)


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
    jobs = [OPEN_MPI | dict(PMIX_NAMESPACE=f"prte-host-{pid}@1") for pid in range(4000, 4010)]
    assert len({detect_launch(env=env).init_method for env in jobs}) == len(jobs)
