"""ReplicaCheck names the tensor and the processes, along every axis that replicates, and leaves a process its own buffers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from flextrain.core.base.errors import DivergenceError
from flextrain.core.base.tensors import of_bits
from flextrain.core.comm.replica_check import ReplicaCheck

from .test_replicas import group


def check_four() -> list[str]:
    """What is said of four processes, two shards with two replicas each: equal, then with one difference after another."""
    said: list[str] = []
    with group(4) as rank:
        mesh = init_device_mesh("cpu", (2, 2))
        sharded = distribute_tensor(torch.arange(10.0), mesh, [Replicate(), Shard(0)])
        alone = distribute_tensor(torch.arange(10.0), mesh, [Shard(0), Shard(0)])
        weights = {"sharded": sharded, "alone": alone, "whole": torch.ones(3, dtype=torch.bfloat16)}
        if rank == 2:
            weights["only there"] = torch.ones(2)
            weights["of shard 0"] = torch.ones(2)
        if rank == 0:
            weights["of shard 0"] = torch.ones(2)
        mask, statistics = torch.arange(4), torch.zeros(4)
        check = ReplicaCheck()

        def look() -> None:
            try:
                found = check.check([weights, {}], {"mask": mask, "statistics": statistics})
                said.append(",".join(sorted(found)))
            except DivergenceError as error:
                said.append(str(error).partition(": ")[2].partition(";")[0])

        def change(tensor: torch.Tensor, *ranks: int) -> None:
            memory = tensor.view(torch.uint8).numpy()
            for _ in range(2):  # and back
                if rank in ranks:
                    memory[1] ^= 1
                if _ == 0:
                    look()

        look()
        change(sharded.to_local(), 3)
        alone.to_local().fill_(rank)
        look()
        del weights["of shard 0" if rank in (0, 2) else "whole"]
        weights.pop("only there", None)
        weights["whole"] = torch.ones(3, dtype=torch.bfloat16)
        look()
        change(weights["whole"], 1)
        change(weights["whole"], 0, 1)
        change(mask, 2)
        statistics.data += rank  # torch does not count it
        look()
        look()
    return said


@pytest.mark.distributed
def test_four_processes(workers: Any) -> None:
    for said in workers(4).run(check_four):
        assert said == [
            "sharded",  # whole tensors: processes have others, so a save has to compare them one by one
            "rank 1 and rank 3 differ in sharded",
            "sharded",
            "sharded,whole",
            "rank 1 differs from ranks 0, 2, 3 in whole",
            "ranks 0, 1 and ranks 2, 3 differ in whole",
            "rank 2 differs from ranks 0, 1, 3 in mask",
            "sharded,whole",
            "sharded,whole",
        ]


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.complex64, torch.complex128, torch.float32, torch.bfloat16, torch.bool]
)
def test_every_single_bit_counts_on_a_device(dtype: torch.dtype) -> None:
    """Also the uppermost of eight bytes, which a weighted sum loses if its weight is even."""
    tensor = torch.randn(1500).to(dtype)
    number, memory = int(of_bits(tensor)), tensor.view(torch.uint8).numpy()
    for at in (0, 1, 700, 701, 1023, 1024, 1499):
        for bit in range(8 * tensor.itemsize if dtype is not torch.bool else 1):
            memory[at * tensor.itemsize + bit // 8] ^= 1 << bit % 8
            assert int(of_bits(tensor)) != number, (at, bit)
            memory[at * tensor.itemsize + bit // 8] ^= 1 << bit % 8
