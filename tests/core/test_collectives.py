"""Collectives: what they answer in a world of one without a group, and in one of two."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flextrain.core.comm import collectives as dist
from flextrain.testing import WorkerGroup
from tests.conftest import WorkerFactory


@dist.master_only
def whoami() -> int:
    return dist.get_rank()


def test_without_a_group_the_world_is_this_process() -> None:
    tensor = torch.tensor([1.0, 2.0])
    assert not dist.is_initialized()
    assert (dist.get_rank(), dist.get_world_size(), dist.is_main()) == (0, 1, True)
    for op in ("sum", "mean", "max", "min"):
        assert dist.all_reduce(tensor, op) is tensor
    assert dist.broadcast(tensor) is tensor
    dist.broadcast_tensors([tensor])
    dist.average_tensors([tensor])
    dist.barrier()
    assert tensor.tolist() == [1.0, 2.0]
    assert dist.broadcast_object("a") == "a"
    assert dist.all_gather_object("a") == dist.gather_object("a") == ["a"]
    assert whoami() == 0
    dist.destroy_process_group()


def collectives() -> dict[str, Any]:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method="env://", timeout_s=30)
    given = {op: torch.tensor([1.0 + rank, 5.0 - 2 * rank]) for op in ("sum", "mean", "max", "min")}
    results: dict[str, Any] = {op: dist.all_reduce(tensor, op).tolist() for op, tensor in given.items()}
    results["in place"] = given["sum"].tolist()
    results["broadcast"] = dist.broadcast(torch.tensor([rank]), src=1).item()
    results["object"] = dist.broadcast_object({"from": rank}, src=1)
    results["all_gather"] = dist.all_gather_object(f"rank {rank}")
    results["gather"] = dist.gather_object(f"rank {rank}")
    results["facts"] = (dist.is_initialized(), dist.get_rank(), dist.get_world_size(), dist.is_main(), whoami())
    dist.barrier()
    dist.destroy_process_group()
    dist.destroy_process_group()
    results["after"] = (dist.is_initialized(), dist.get_world_size())
    return results


@pytest.mark.distributed
def test_in_a_group_of_two(workers2: WorkerGroup) -> None:
    for rank, results in enumerate(workers2.run(collectives)):
        assert results == {
            "sum": [3.0, 8.0],
            "mean": [1.5, 4.0],
            "max": [2.0, 5.0],
            "min": [1.0, 3.0],
            "in place": [3.0, 8.0],
            "broadcast": 1,
            "object": {"from": 1},
            "all_gather": ["rank 0", "rank 1"],
            "gather": ["rank 0", "rank 1"] if rank == 0 else None,
            "facts": (True, rank, 2, rank == 0, 0 if rank == 0 else None),
            "after": (False, 1),
        }


def gathered_by_doubling() -> list[Any]:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=world_size, init_method="env://", timeout_s=30)
    others = dist.group_with_this_process([[0], [*range(1, world_size)]])
    found = [dist.all_gather_small([rank, -rank], group) for group in (others, torch.distributed.group.WORLD)]
    dist.destroy_process_group()
    return found


@pytest.mark.distributed
def test_small_messages_reach_every_process_by_doubling(workers: WorkerFactory) -> None:
    for world_size in (2, 3, 4):
        everyone = [[rank, -rank] for rank in range(world_size)]
        for rank, found in enumerate(workers(world_size).run(gathered_by_doubling)):
            assert found == [everyone[1:] if rank else everyone[:1], everyone]


@pytest.mark.skipif(not torch.distributed.is_nccl_available(), reason="this torch has no NCCL")
@pytest.mark.parametrize(
    "of_all, own, blocks", [("cpu:gloo,cuda:nccl", None, 4), ("gloo", "nccl", 4), ("gloo", None, None)]
)
def test_thread_blocks_are_asked_of_nccl(
    monkeypatch: pytest.MonkeyPatch, of_all: str, own: str | None, blocks: int | None
) -> None:
    """Without a GPU there is no group of NCCL: what torch is asked for is seen, not what NCCL does with it."""
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda: of_all)
    monkeypatch.setattr(torch.distributed, "new_group", lambda ranks, **options: asked.append(options))
    dist.group_with_this_process([[0]], own, timeout_s=60, most_blocks=4)
    (options,) = asked
    assert options["timeout"].total_seconds() == 60
    if blocks is None:
        assert options["pg_options"] is None
    else:
        assert (options["pg_options"].config.max_ctas, options["pg_options"]._timeout) == (blocks, options["timeout"])


def mixed(rank: int) -> list[torch.Tensor]:
    """Tensors of several shapes, dtypes and layouts, which differ by process."""
    counts = torch.arange(24.0).view(2, 3, 4) + 100 * rank
    return [counts, counts[0].t(), counts.double(), torch.tensor(7.0 + rank), torch.empty(0), counts.half()]


def many_tensors(bucket_bytes: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method="env://", timeout_s=30)
    sent, averaged = mixed(rank), mixed(rank)
    sent.append(torch.nn.Parameter(torch.tensor([float(rank)])))
    dist.broadcast_tensors(sent, src=1, bucket_bytes=bucket_bytes)
    dist.average_tensors(averaged, bucket_bytes=bucket_bytes)
    return [tensor.detach().contiguous() for tensor in sent], [tensor.contiguous() for tensor in averaged]


@pytest.mark.distributed
@pytest.mark.parametrize("bucket_bytes", [1, 100, 2**20])
def test_many_tensors_in_buckets(workers2: WorkerGroup, bucket_bytes: int) -> None:
    for sent, averaged in workers2.run(many_tensors, bucket_bytes):
        torch.testing.assert_close(sent, [*mixed(1), torch.ones(1)], rtol=0, atol=0)
        mean = [((a.double() + b.double()) / 2).to(a.dtype) for a, b in zip(mixed(0), mixed(1), strict=True)]
        torch.testing.assert_close(averaged, mean, rtol=0, atol=0)


def test_buckets_hold_one_dtype_and_no_more_than_their_size() -> None:
    sizes = [(torch.float32, 10), (torch.float64, 5), (torch.float32, 10), (torch.float32, 30), (torch.float32, 5)]
    tensors = [torch.zeros(numel, dtype=dtype) for dtype, numel in sizes]
    buckets = dist.buckets(tensors, bucket_bytes=100)
    shapes = [[(tensor.dtype, tensor.numel()) for tensor in bucket] for bucket in buckets]
    small, big = torch.float32, torch.float64
    assert shapes == [[(small, 10), (small, 10)], [(small, 30)], [(small, 5)], [(big, 5)]]


def rejoin() -> tuple[int, int]:
    rank, sizes = int(os.environ["RANK"]), []
    for _ in range(2):
        dist.init_process_group("gloo", rank=rank, world_size=2, init_method="env://", timeout_s=30)
        sizes.append(dist.get_world_size())
        dist.destroy_process_group()
    return sizes[0], sizes[1]


@pytest.mark.distributed
def test_a_group_can_be_left_and_joined_again(workers2: WorkerGroup) -> None:
    assert workers2.run(rejoin) == [(2, 2), (2, 2)]


# Four processes that end as a script's does; forked, because importing torch takes each of them seconds.
LEAVES = """
import os, sys, torch, torch.distributed as dist
from flextrain.core.comm.collectives import init_process_group, leave_at_exit
started = []
for rank in range(4):
    started.append(os.fork())
    if not started[-1]:
        break
else:
    print([os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in started], flush=True)
    os._exit(0)
init_process_group("gloo", rank=rank, world_size=4, init_method=sys.argv[1], timeout_s=60)
leave_at_exit(torch.device("cpu"))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(500, 500))  # holds the group beyond its end
large, box = torch.zeros(1_000_000), [None] * 4
model(torch.zeros(1, 500)).sum().backward()
for _ in range(3):
    dist.all_reduce(large)
    dist.all_gather_object(box, {"a": 1})
"""


@pytest.mark.full
@pytest.mark.distributed
def test_the_interpreter_ends_in_peace_right_after_a_collective(tmp_path: Path) -> None:
    """Without ``leave_at_exit`` about every third process aborts while gloo lets go of its last message."""
    done = subprocess.run(
        [sys.executable, "-c", LEAVES, f"file://{tmp_path}/meet"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "[0, 0, 0, 0]\n", done.stdout + done.stderr
