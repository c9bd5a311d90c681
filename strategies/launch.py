"""Detect the launcher and rank of this process (torchrun, Slurm, Open MPI), and start processes without torchrun."""

from __future__ import annotations

import os
import pickle
import re
import tempfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from ..core.errors import ConfigError, LaunchError, one_of, suggest

LAUNCHERS = ("none", "pytorch", "slurm", "mpi")
# A port is chosen by the job's name, so that all its processes agree; below the system's ephemeral ports.
_PORTS = range(20000, 32768)


@dataclass(frozen=True)
class Launch:
    """This process's rank and the job's facts, as the launcher gives them.

    Attributes:
        launcher: "none", "pytorch" (torchrun and torch.distributed.launch), "slurm" or "mpi" (Open MPI).
        rank, world_size: rank of this process, and number of all processes.
        local_rank: rank of this process on its machine; selects the device.
        init_method: address of the rendezvous: ``env://`` or ``tcp://host:port``.
        job: the launcher's unique name of the job; empty if it has none. Processes of another job are refused.
    """

    launcher: str = "none"
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    init_method: str = "env://"
    job: str = ""


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
        started = _int(env, "WORLD_SIZE", 1)
        if started > 1 and "RANK" in env:
            raise LaunchError(
                f'launcher: "none" was given and torchrun started {started} processes, leave launcher out'
            )
        return Launch()
    if launcher == "pytorch" or (launcher is None and {"RANK", "WORLD_SIZE"} <= env.keys()):
        rank, size = _int(env, "RANK"), _int(env, "WORLD_SIZE")
        local = _int(env, "LOCAL_RANK", rank)
        if not 0 <= rank < size or local < 0:
            raise LaunchError(
                f"launcher: RANK={rank}, LOCAL_RANK={local} and WORLD_SIZE={size} do not fit, ranks go from 0 to "
                "WORLD_SIZE - 1; start the script with torchrun, which sets them"
            )
        if size > 1 and (unset := [name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.get(name)]):
            raise LaunchError(
                f"launcher: {' and '.join(unset)} must be set for {size} processes, to the address and a free port of "
                "rank 0's machine; start the script with torchrun, which sets them"
            )
        _int(env, "MASTER_PORT", 0)
        return Launch("pytorch", rank, size, local)
    # In a batch script without srun, SLURM_NTASKS counts tasks that were not started; SLURM_STEP_NUM_TASKS does not.
    if launcher == "slurm" or (launcher is None and _int(env, "SLURM_STEP_NUM_TASKS", 1) > 1):
        size = _int(env, "SLURM_STEP_NUM_TASKS")
        host = env.get("MASTER_ADDR") or first_host(_text(env, "SLURM_STEP_NODELIST", "SLURM_NODELIST"))
        job = f"Slurm job {env.get('SLURM_JOB_ID', '?')} step {env.get('SLURM_STEP_ID', '?')}"
        # Neighbouring jobs, and the steps of each, get different ports.
        own = _PORTS[(_int(env, "SLURM_JOB_ID", 0) * 101 + _int(env, "SLURM_STEP_ID", 0)) % len(_PORTS)]
        init = f"tcp://{host}:{_int(env, 'MASTER_PORT', own)}"
        return Launch("slurm", _int(env, "SLURM_PROCID"), size, _int(env, "SLURM_LOCALID"), init, job)
    if launcher == "mpi" or (launcher is None and _int(env, "OMPI_COMM_WORLD_SIZE", 1) > 1):
        size, local = _int(env, "OMPI_COMM_WORLD_SIZE"), _int(env, "OMPI_COMM_WORLD_LOCAL_SIZE", 0)
        one_machine = "127.0.0.1" if local == size else None
        meeting = env.get("MASTER_ADDR") or one_machine
        if meeting is None:
            raise LaunchError("launcher: Open MPI runs on several machines, set MASTER_ADDR to the first one's address")
        name = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid", "")
        own = _PORTS[zlib.crc32(name.encode()) % len(_PORTS)] if name else 29500
        init = f"tcp://{meeting}:{_int(env, 'MASTER_PORT', own)}"
        ranks = _int(env, "OMPI_COMM_WORLD_RANK"), size, _int(env, "OMPI_COMM_WORLD_LOCAL_RANK")
        return Launch("mpi", *ranks, init, f"Open MPI job {name}" if name else "")
    _refuse_half_a_launch(env)
    return Launch()


def _refuse_half_a_launch(env: Mapping[str, str]) -> None:
    """Raise LaunchError if variables say that there are several processes, each of which would train alone."""
    # One process alone is meant by WORLD_SIZE=1 and LOCAL_RANK=0; every process of a job has a RANK.
    for name, other, alone in (("RANK", "WORLD_SIZE", None), ("WORLD_SIZE", "RANK", 1), ("LOCAL_RANK", "RANK", 0)):
        if name in env and other not in env and _int(env, name) != alone:
            raise LaunchError(
                f"launcher: {name}={env[name]} is set and {other} is not; start the script with torchrun, which sets both, "
                f'unset {name}, or give launcher="none" to train in this process alone'
            )
    if _int(env, "PMI_SIZE", 1) > 1:
        raise LaunchError(
            f"launcher: PMI_SIZE={env['PMI_SIZE']} says that MPICH or Intel MPI started several processes, which is not "
            'known here; set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or give launcher="none"'
        )


def first_host(nodelist: str) -> str:
    """Return the first machine of Slurm's list: ``gpu[07-09,12]-a,cpu1`` gives ``gpu07-a``."""
    match = re.match(r"(?:[^,\[\]\s]|\[\w+[^\[\]]*\])+(?=,|$)", nodelist)
    if match is None:
        raise LaunchError(f'launcher: cannot read a machine from SLURM_STEP_NODELIST="{nodelist}", set MASTER_ADDR')
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", match.group())


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


def _int(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    value = env.get(name)
    if value is None:
        if default is not None:
            return default
        raise LaunchError(f"launcher: environment variable {name} is not set, was the script started by the launcher?")
    if not re.fullmatch(r"-?\d+", value):
        raise LaunchError(f'launcher: environment variable {name}="{value}" is no whole number')
    return int(value)


def _text(env: Mapping[str, str], *names: str) -> str:
    for name in names:
        if env.get(name):
            return env[name]
    raise LaunchError(f"launcher: environment variable {names[0]} is not set, was the script started by the launcher?")
