"""A second process group in one process: nothing that DTensor remembers belongs to the first."""

from __future__ import annotations

import os

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from flextrain.core.comm import collectives as dist
from flextrain.testing import WorkerGroup

pytestmark = pytest.mark.distributed


def sums() -> list[float]:
    """In a worker: a sum over a mesh; there is no group of the name that it had, when it is made the second time."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    found = []
    for more in (3, 0):
        dist.init_process_group("gloo", rank=rank, world_size=world_size, init_method="env://", timeout_s=30)
        for _ in range(more):
            torch.distributed.new_group(range(world_size))
        mesh = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("a", "b"))["b"]
        whole = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)], src_data_rank=None)
        found.append(float((whole * 2).full_tensor().sum()))
        dist.destroy_process_group()
    return found


def test_groups_of_another_name(workers2: WorkerGroup) -> None:
    assert workers2.run(sums) == [[12.0, 12.0]] * 2
