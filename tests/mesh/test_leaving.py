"""A mesh that is left leaves nothing behind: many trainings may follow each other in one process."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flextrain.testing import WorkerGroup

from ..device import DEVICE
from .models import sample
from .parity import Recipe, dtype_of, started

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc"),
]


def threads_of_groups() -> int:
    """Every process group of gloo has one."""
    names = ((task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir())
    return sum(name == "gloo_tcp_loop" for name in names)


def train_and_leave(spec: dict[str, Any], model: str) -> tuple[int, int, int]:
    gc.collect()
    before = threads_of_groups()
    with dtype_of(torch.float64), started(spec, model, Recipe()) as session:
        batch = {name: value.to(DEVICE) for name, value in sample(model, 4, 0).items()}
        session.model(**batch).loss.backward()
        during = threads_of_groups()
    del session
    gc.collect()
    return before, during, threads_of_groups()


@pytest.mark.parametrize("axis", ["tp", "dp_shard", pytest.param("cp", marks=pytest.mark.full)])
def test_no_process_group_lives_on(workers2: WorkerGroup, axis: str) -> None:
    """What DTensor remembers of layouts kept all groups of every mesh of tensor parallelism, and their threads."""
    for before, during, after in workers2.run(train_and_leave, dict(type="MeshStrategy", **{axis: 2}), "llama"):
        assert during > before
        assert after <= before
