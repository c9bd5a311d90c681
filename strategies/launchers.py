"""Who started this process, and how its processes find each other; and starting processes from Python."""

from __future__ import annotations

import os
import pickle
import platform
import re
import signal
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from ..core.base.errors import ConfigError, FlexTrainError, LaunchError, one_of, suggest
from ..core.comm.collectives import is_initialized
from ..core.comm.rendezvous import say_why_this_process_leaves

# Launch: this process's rank and the job's facts; and reading the variables that they come from.


PORTS = range(20000, 32768)
"""A port is chosen by the job's name, so that all its processes agree; below the system's ephemeral ports."""


@dataclass(frozen=True)
class Launch:
    """This process's rank and the job's facts, as the launcher gives them.

    Attributes:
        launcher: "none", "pytorch" (torchrun, torch.distributed.launch, Kubernetes), "slurm" or "mpi" (Open MPI, MPICH,
            Intel MPI).
        rank, world_size: rank of this process, and number of all processes.
        local_rank: rank of this process on its machine; selects the device.
        init_method: address of the rendezvous: ``env://`` or ``tcp://host:port``.
        job: the launcher's unique name of the job; empty if it has none. Processes of another job are refused.
        several_machines: True if the launcher says that not all processes are on this machine.
        is_derived: True if the address was worked out here, not given; rank 0 then checks that it is its own.
        ends_together: True if the launcher ends all processes when one fails.
    """

    launcher: str = "none"
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    init_method: str = "env://"
    job: str = ""
    several_machines: bool = False
    is_derived: bool = False
    ends_together: bool = False


def read_int(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    """The whole number in a variable, or ``default`` if it is not set.

    Raises:
        LaunchError: the variable is no number, or is not set and there is no default.
    """
    value = env.get(name)
    if value is None:
        if default is not None:
            return default
        raise LaunchError(f"launcher: environment variable {name} is not set, was the script started by the launcher?")
    if not re.fullmatch(r"-?\d+", value):
        raise LaunchError(f'launcher: environment variable {name}="{value}" is no whole number')
    return int(value)


def read_text(env: Mapping[str, str], *names: str) -> str:
    """The first of these variables that is not empty.

    Raises:
        LaunchError: none is set.
    """
    for name in names:
        if env.get(name):
            return env[name]
    raise LaunchError(f"launcher: environment variable {names[0]} is not set, was the script started by the launcher?")


def check_ranks(rank: int, world_size: int, local_rank: int, names: tuple[str, str, str], advice: str) -> None:
    """Raise LaunchError if three numbers, read from the variables ``names`` in this order, do not fit each other."""
    if not 0 <= rank < world_size or local_rank < 0:
        raise LaunchError(
            f"launcher: {names[0]}={rank}, {names[2]}={local_rank} and {names[1]}={world_size} do not fit, ranks go from 0 "
            f"to {names[1]} - 1; {advice}"
        )


def address(host: str) -> str:
    """``host`` as it stands in a URL: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


# torchrun, torch.distributed.launch, and what sets the same variables: Kubernetes' jobs, Ray, shell scripts.


_ADVICE = "start the script with torchrun, which sets them"


def is_torchrun(env: Mapping[str, str]) -> bool:
    """Whether the variables of torchrun are set."""
    return {"RANK", "WORLD_SIZE"} <= env.keys()


def torchrun(env: Mapping[str, str]) -> Launch:
    """The facts in torchrun's variables.

    Raises:
        LaunchError: one is missing or wrong.
    """
    rank, size = read_int(env, "RANK"), read_int(env, "WORLD_SIZE")
    # A pod of a PyTorchJob has one process, and no LOCAL_RANK; elsewhere all processes are taken to be on one machine.
    local = read_int(env, "LOCAL_RANK", 0 if "KUBERNETES_SERVICE_HOST" in env else rank)
    check_ranks(rank, size, local, ("RANK", "WORLD_SIZE", "LOCAL_RANK"), _ADVICE)
    if size > 1 and (unset := [name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.get(name)]):
        raise LaunchError(
            f"launcher: {' and '.join(unset)} must be set for {size} processes, to the address and a free port of "
            f"rank 0's machine; {_ADVICE}"
        )
    read_int(env, "MASTER_PORT", 0)
    run = env.get("TORCHELASTIC_RUN_ID", "none")  # "none": no --rdzv-id was given
    return Launch(
        "pytorch",
        rank,
        size,
        local,
        job="" if run == "none" else f"torchrun job {run}",
        several_machines=_several_machines(env, size),
        ends_together="TORCHELASTIC_RUN_ID" in env,
    )


def _several_machines(env: Mapping[str, str], world_size: int) -> bool:
    # Scripts that set the variables themselves often leave this one out.
    local = read_int(env, "LOCAL_WORLD_SIZE", 0)
    return local < world_size if local else env.get("MASTER_ADDR") not in ("localhost", "127.0.0.1", "::1")


def refuse_half_a_launch(env: Mapping[str, str]) -> None:
    """Raise LaunchError if variables say that there are several processes, each of which would train alone."""
    # One process alone is meant by WORLD_SIZE=1 and LOCAL_RANK=0; every process of a job has a RANK.
    for name, other, alone in (("RANK", "WORLD_SIZE", None), ("WORLD_SIZE", "RANK", 1), ("LOCAL_RANK", "RANK", 0)):
        if name in env and other not in env and read_int(env, name) != alone:
            raise LaunchError(
                f"launcher: {name}={env[name]} is set and {other} is not; start the script with torchrun, which sets both, "
                f'unset {name}, or give launcher="none" to train in this process alone'
            )


# Slurm's srun.


def is_srun(env: Mapping[str, str]) -> bool:
    """Whether srun started several tasks."""
    # In a batch script without srun, SLURM_NTASKS counts tasks that were not started; SLURM_STEP_NUM_TASKS does not.
    return read_int(env, "SLURM_STEP_NUM_TASKS", 1) > 1


def srun(env: Mapping[str, str]) -> Launch:
    """The facts in the variables of a step.

    Raises:
        LaunchError: one is missing or wrong.
    """
    size, rank, local = (read_int(env, name) for name in ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID"))
    check_ranks(
        rank, size, local, ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"), "start the script with srun"
    )
    several = read_int(env, "SLURM_STEP_NUM_NODES", 0) != 1
    host = env.get("MASTER_ADDR") or (_first_machine(env) if several else "127.0.0.1")
    # Neighbouring jobs, and the steps of each, get different ports.
    own = PORTS[(read_int(env, "SLURM_JOB_ID", 0) * 101 + read_int(env, "SLURM_STEP_ID", 0)) % len(PORTS)]
    return Launch(
        "slurm",
        rank,
        size,
        local,
        f"tcp://{address(host)}:{read_int(env, 'MASTER_PORT', own)}",
        _name(env),
        several_machines=several,
        is_derived=not env.get("MASTER_ADDR"),
    )


def _name(env: Mapping[str, str]) -> str:
    name = f"Slurm job {env.get('SLURM_JOB_ID', '?')} step {env.get('SLURM_STEP_ID', '?')}"
    # The steps of a requeued job count from 0 again, and a process of the start before may be left.
    restarts = read_int(env, "SLURM_RESTART_COUNT", 0)
    return f"{name}, restart {restarts}" if restarts else name


def _first_machine(env: Mapping[str, str]) -> str:
    """The machine of task 0."""
    nodes = read_text(env, "SLURM_STEP_NODELIST", "SLURM_NODELIST")
    if not env.get("SLURM_DISTRIBUTION", "").startswith("arbitrary"):
        return first_host(nodes)
    try:  # the list of machines is sorted; the order of the tasks is in the file that the user has given
        return Path(env.get("SLURM_HOSTFILE", "")).read_text().split()[0]
    except (OSError, IndexError):
        raise LaunchError(
            "launcher: srun --distribution=arbitrary does not say where task 0 is, set MASTER_ADDR to the address of its "
            "machine"
        ) from None


def first_host(nodelist: str) -> str:
    """The first machine of Slurm's list: ``gpu[07-09,12]-a,cpu1`` gives ``gpu07-a``."""
    match = re.match(r"(?:[^,\[\]\s]|\[\w+[^\[\]]*\])+(?=,|$)", nodelist)
    if match is None:
        raise LaunchError(f'launcher: cannot read a machine from SLURM_STEP_NODELIST="{nodelist}", set MASTER_ADDR')
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", match.group())


# mpirun and mpiexec of Open MPI, MPICH and Intel MPI. Their variables were read from Open MPI 4.1 and 5.0, MPICH 4.0
# and Intel MPI 2021; no MPI library is used.


class _Names(NamedTuple):
    """The variables of a family of MPI launchers."""

    rank: str
    size: str
    local_rank: str
    local_size: str


_OPEN_MPI = _Names(
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
)
_HYDRA = _Names("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
"""Of mpiexec.hydra, which MPICH and Intel MPI have."""


def is_mpi(env: Mapping[str, str]) -> bool:
    """Whether an MPI launcher started several processes."""
    return read_int(env, _OPEN_MPI.size, 1) > 1 or _is_hydra(env)


def _is_hydra(env: Mapping[str, str]) -> bool:
    # srun sets PMI_RANK and PMI_SIZE too, with --mpi=pmi2; hydra alone says which rank of its machine a process is.
    return read_int(env, _HYDRA.size, 1) > 1 and _HYDRA.local_rank in env


def mpi(env: Mapping[str, str]) -> Launch:
    """The facts in the variables of an MPI launcher.

    Raises:
        LaunchError: one is missing or wrong, or several machines have no address at which to meet.
    """
    hydra = _is_hydra(env) and _OPEN_MPI.size not in env
    names = _HYDRA if hydra else _OPEN_MPI
    size, rank, local = read_int(env, names.size), read_int(env, names.rank), read_int(env, names.local_rank)
    check_ranks(rank, size, local, names[:3], "start the script with mpirun, which sets them")
    local_size = read_int(env, names.local_size, 0)
    several = local_size != size
    job, first = _hydras_job(env, size / max(local_size, 1)) if hydra else _open_mpis_job(env)
    host = env.get("MASTER_ADDR") or (first if several else "127.0.0.1")
    if not host:
        raise LaunchError(
            "launcher: mpirun runs on several machines and does not say where the first one is, set MASTER_ADDR to its "
            "address on every machine"
        )
    own = PORTS[zlib.crc32(job.encode()) % len(PORTS)] if job else 29500
    return Launch(
        "mpi",
        rank,
        size,
        local,
        f"tcp://{address(host)}:{read_int(env, 'MASTER_PORT', own)}",
        job,
        several_machines=several,
        is_derived=not env.get("MASTER_ADDR"),
        ends_together=True,
    )


def _open_mpis_job(env: Mapping[str, str]) -> tuple[str, str]:
    """Name of the job, and the machine of mpirun, on which rank 0 usually is; both may be empty."""
    name = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid", "")
    # Open MPI 4: "2816.0;tcp://10.1.0.1,10.2.0.1:39643;tcp6://...". Open MPI 5: the name is "prterun-HOST-PID@1".
    uri = re.search(r";tcp://([\d.]+)[,:]", env.get("OMPI_MCA_orte_hnp_uri", ""))
    host = uri or re.fullmatch(r"prte(?:run)?-(.+)-\d+@\d+", name)
    return f"Open MPI job {name}" if name else "", host[1] if host else ""


def _hydras_job(env: Mapping[str, str], machines: float) -> tuple[str, str]:
    """Name of the job, and the machine of mpiexec, on which rank 0 usually is; both may be empty.

    MPICH has no variable for either. Its own process on each machine has them on the command line.

    Args:
        machines: how many there are about; beyond a number of them, Intel MPI's processes start each other in a tree.
    """
    found = _hydras_options(env.get("HYDRA_BSTRAP_LOCALHOST", ""))
    if uuid := env.get("I_MPI_HYDRA_UUID"):
        is_tree = machines > read_int(env, "HYDRA_BSTRAP_TREE_WIDTH", 16)
        return f"Intel MPI job {uuid}", "" if is_tree else found.get("upstream-host", "")
    control = found.get("control-port", "")
    return f"MPICH job {control}" if control else "", control.rpartition(":")[0]


def _hydras_options(here: str) -> dict[str, str]:
    """Options that name mpiexec's machine, of the process of hydra that started this one; empty where /proc is not.

    Args:
        here: this machine's name, for processes that Intel MPI's mpiexec has started without another one between.
    """
    process = "self"
    while process not in ("0", "1"):
        try:
            command = Path("/proc", process, "cmdline").read_text(errors="replace").replace("\0", " ")
            status = Path("/proc", process, "status").read_text()
        except OSError:
            break
        if "hydra_pmi_proxy" in command or "hydra_bstrap_proxy" in command:
            found = dict(re.findall(r"--(control-port|upstream-host) (\S+)", command))
            if found:
                return found
        if Path(command.partition(" ")[0]).name.startswith("mpiexec"):
            return {"upstream-host": here}
        parent = re.search(r"^PPid:\s*(\d+)", status, re.MULTILINE)
        process = parent[1] if parent else "0"
    return {}


# detect_launch: which launcher started this process, and what it says.


LAUNCHERS = ("none", "pytorch", "slurm", "mpi")


def detect_launch(launcher: str | None = None, env: Mapping[str, str] | None = None) -> Launch:
    """Return this process's rank and the job's facts.

    Args:
        launcher: one of LAUNCHERS, or None to detect it.
        env: environment variables; default: ``os.environ``.

    Raises:
        ConfigError: an unknown launcher.
        LaunchError: a variable of the launcher is missing, or "none" was given in a job of several processes.
    """
    env = os.environ if env is None else env
    if launcher not in (None, *LAUNCHERS):
        raise ConfigError(
            f'launcher: "{launcher}" is not allowed, choose {one_of(LAUNCHERS)}{suggest(str(launcher), LAUNCHERS)}'
        )
    if launcher == "none":
        started = read_int(env, "WORLD_SIZE", 1)
        if started > 1 and "RANK" in env:
            raise LaunchError(
                f'launcher: "none" was given and torchrun started {started} processes, leave launcher out'
            )
        return Launch()
    # What started this process last comes first: srun and mpirun may have started torchrun. MPI launchers start a process
    # of their own per machine with srun, whose variables their ranks then have, with the wrong numbers.
    if launcher == "pytorch" or (launcher is None and is_torchrun(env)):
        return torchrun(env)
    if launcher == "mpi" or (launcher is None and is_mpi(env)):
        return mpi(env)
    if launcher == "slurm" or (launcher is None and is_srun(env)):
        return srun(env)
    refuse_half_a_launch(env)
    _refuse_unknown_launchers(env)
    return Launch()


def _refuse_unknown_launchers(env: Mapping[str, str]) -> None:
    """Raise LaunchError if another launcher started several processes, each of which would train alone."""
    if read_int(env, "HOROVOD_SIZE", 1) > 1:
        raise LaunchError(
            f"launcher: HOROVOD_SIZE={env['HOROVOD_SIZE']} says that horovodrun started several processes with gloo, which "
            "does not say where they meet; start the script with horovodrun --mpi, mpirun or torchrun"
        )
    if read_int(env, "PMI_SIZE", 1) > 1:
        said = f"PMI_SIZE={env['PMI_SIZE']}"
    elif (rank := env.get("PMIX_RANK", "0")) != "0":
        said = f"PMIX_RANK={rank}"
    else:
        return
    raise LaunchError(
        f"launcher: {said} says that several processes were started, by a launcher that is not known here; set RANK, "
        'WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, or give launcher="none"'
    )


# A process that fails before the process group exists says so to the others, where the launcher would let them wait.


_PATIENCE_S = 10.0


@contextmanager
def saying_why_this_process_leaves(launcher: str | None = None) -> Iterator[None]:
    """A context before the process group exists; its FlexTrainError also ends the other processes, with its text.

    torchrun and mpirun end all processes when one fails. srun without --kill-on-bad-exit and scripts that start
    processes themselves do not, and the others would wait for ``timeout_s``. The error is raised after 10 s at the
    latest, if the others do not come to hear it.

    Args:
        launcher: as for ``detect_launch``.
    """
    try:
        yield
    except FlexTrainError as error:
        _say(launcher, f"{type(error).__name__}: {error}")
        raise


def say_that_the_end_was_asked(launcher: str | None, what: str) -> None:
    """Make the other processes raise EndAskedError if the process group does not exist yet; its text is ``what``, rank and host.

    Under torchrun and mpirun nothing is said, they end all processes. Returns after 10 s at the latest.

    Args:
        launcher: as for ``detect_launch``.
    """
    _say(launcher, what, was_asked=True)


def _say(launcher: str | None, why: str, was_asked: bool = False) -> None:
    try:
        launch = detect_launch(launcher)
    except FlexTrainError:  # then nobody knows where the others are
        return
    if launch.world_size > 1 and not launch.ends_together and not is_initialized():
        say_why_this_process_leaves(
            launch.init_method,
            rank=launch.rank,
            world_size=launch.world_size,
            why=f"{why}, which came to rank {launch.rank} on {platform.node()}" if was_asked else why,
            timeout_s=_PATIENCE_S,
            job=launch.job,
            was_asked=was_asked,
        )


__all__ = ["LAUNCHERS", "Launch", "detect_launch", "say_that_the_end_was_asked", "saying_why_this_process_leaves"]


# launch: start processes on this machine from Python, without torchrun.


def launch(
    fn: Callable[..., Any],
    nprocs: int,
    *args: Any,
    start_method: Literal["spawn", "fork"] = "spawn",
    **kwargs: Any,
) -> Any:
    """Run ``fn(*args, **kwargs)`` in ``nprocs`` processes of this machine like torchrun; return rank 0's result.

    For notebooks and scripts without torchrun. With "spawn", ``fn`` must be importable by the new processes; a function
    defined in a notebook needs "fork", and the accelerator must not have been used before.

    Args:
        fn: the function.
        nprocs: number of processes.
        args, kwargs: its arguments; with "spawn" they must be picklable.
        start_method: how Python starts the processes.

    Raises:
        LaunchError: a process failed; the message has its rank and traceback, the other processes are stopped.
    """
    if nprocs < 1:
        raise ConfigError(f"nprocs: {nprocs} is not allowed, give 1 or more")
    # The store listens in this process, as in torchrun: another program could take a port that is only looked up.
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result"
        job = (fn, args, kwargs, nprocs, store.port, str(result))
        try:
            start_processes(  # type: ignore[no-untyped-call]
                _run_as_rank, job, nprocs=nprocs, join=True, start_method=start_method
            )
        except (ProcessRaisedException, ProcessExitedException) as error:
            raise LaunchError(f"process {error.error_index} of {nprocs} failed: {error}") from None
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            advice = 'define it in a module that can be imported, or give start_method="fork"'
            raise LaunchError(f"fn: cannot be sent to another process, {error}; {advice}") from None
        # Safe to unpickle: our own process has just written it in a temporary folder.
        return pickle.loads(result.read_bytes())


def _run_as_rank(
    rank: int, fn: Callable[..., Any], args: Any, kwargs: Any, nprocs: int, port: int, result: str
) -> None:
    # A forked process has the parent's handler, which Python calls only when torch's waiting for the others returns: the
    # parent then waits for half a minute before it kills.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(nprocs),
        LOCAL_WORLD_SIZE=str(nprocs),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    if "OMP_NUM_THREADS" not in os.environ:
        # By default each process starts one thread per core, and the threads compete for the cores.
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // nprocs))
    value = fn(*args, **kwargs)
    if rank == 0:
        Path(result).write_bytes(pickle.dumps(value))
