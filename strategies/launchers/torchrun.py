"""torchrun, torch.distributed.launch, and what sets the same variables: Kubernetes' jobs, Ray, shell scripts."""

from __future__ import annotations

from collections.abc import Mapping

from ...core.errors import LaunchError
from .facts import Launch, check_ranks, read_int

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
