"""mpirun and mpiexec of Open MPI, MPICH and Intel MPI. Their variables were read from Open MPI 4.1 and 5.0, MPICH 4.0 and
Intel MPI 2021; no MPI library is used."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ...core.errors import LaunchError
from .facts import PORTS, Launch, address, check_ranks, read_int


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
