"""The launchers that ``launcher`` and ``strategy.launcher`` can name."""

from __future__ import annotations

from collections.abc import Iterator

from ...strategies.launchers.detect import LAUNCHERS
from .entry import Entry

LAUNCHERS_GROUP = "launchers"

_SUMMARIES = {
    "none": "One process that nothing has started; refused if torchrun has started several.",
    "pytorch": "torchrun, `flextrain run`, python -m torch.distributed.launch, Ray, or anything that sets the same variables.",
    "slurm": "srun of Slurm, one task for each process.",
    "mpi": "mpirun of Open MPI, MPICH or Intel MPI, one rank for each process.",
}
_TEXTS = {
    "none": "The program has one process, and no process group is made.",
    "pytorch": "Read from RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.",
    "slurm": "Read from SLURM_PROCID, SLURM_STEP_NUM_TASKS and SLURM_LOCALID; the processes meet on the machine of task 0.",
    "mpi": "Read from the variables that the launcher gives to its ranks.",
}


def launchers() -> Iterator[Entry]:
    """An entry for every launcher. Without ``launcher`` it is detected, which is right nearly always."""
    for name in LAUNCHERS:
        yield Entry(
            name=name,
            kind="launcher",
            group=LAUNCHERS_GROUP,
            home="flextrain.strategies.launchers.detect:detect_launch",
            summary=_SUMMARIES[name],
            text=f"{_TEXTS[name]} Leave launcher out to have it detected.",
            example=f'launcher="{name}"',
            see_also=("launcher", "strategy.launcher"),
        )
