"""Slurm's srun."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from ...core.errors import LaunchError
from .facts import PORTS, Launch, address, check_ranks, read_int, read_text


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
