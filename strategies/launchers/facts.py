"""Launch: this process's rank and the job's facts; and reading the variables that they come from."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ...core.errors import LaunchError

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
