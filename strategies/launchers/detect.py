"""detect_launch: which launcher started this process, and what it says."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ...core.errors import ConfigError, LaunchError, one_of, suggest
from .facts import Launch, read_int
from .mpi import is_mpi, mpi
from .slurm import is_srun, srun
from .torchrun import is_torchrun, refuse_half_a_launch, torchrun

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
