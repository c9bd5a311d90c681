"""Why there is no strategy for Horovod, and what takes its place: for every message that says so."""

from __future__ import annotations

WHY = "horovod 0.28.1, its last release, does not compile against torch 2.1 or later"
INSTEAD = (
    'strategy="ddp" averages gradients during backward as Horovod does, under the same mpirun or horovodrun --mpi, and under '
    "srun and torchrun; see examples/horovod_style.py"
)
