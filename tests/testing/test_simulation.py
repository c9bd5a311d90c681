"""Simulated ranks: their collectives, what each has for itself, and the messages when they wait for each other."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from packaging.version import Version
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from flextrain import ConfigError, StrategyError
from flextrain.core.comm import agreement as bulletin
from flextrain.core.comm import agreement as matched_calls
from flextrain.core.comm.rendezvous import PROCESS_VARIABLES, each_process_has
from flextrain.testing import WorkerGroup
from flextrain.testing.simulation import Simulation, SimulationError, simulate
from flextrain.testing.simulation.group_private import CHECKED

pytestmark = pytest.mark.skipif(
    Version(torch.__version__).release[:2] != CHECKED.release[:2],
    reason=f"ranks are simulated with torch {CHECKED} only",
)


def collectives() -> dict[str, Any]:
    """The results of every collective on this rank, of numbers that show who sent what."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    own = torch.arange(size * 2, dtype=torch.float64) + 100 * rank
    found: dict[str, Any] = {}

    def keep(name: str, *tensors: Tensor) -> None:
        found[name] = [tensor.tolist() for tensor in tensors]

    for operation in ("SUM", "PRODUCT", "MIN", "MAX"):
        dist.all_reduce(tensor := own.clone() + 1, getattr(dist.ReduceOp, operation))
        keep(operation, tensor)
    dist.all_reduce(tensor := torch.tensor([1 << rank]), dist.ReduceOp.BOR)
    keep("or", tensor)
    dist.broadcast(tensor := own.clone(), 1)
    keep("broadcast", tensor)
    dist.all_gather(parts := [torch.empty_like(own) for _ in range(size)], own)
    keep("all_gather", *parts)
    dist.all_gather_into_tensor(tensor := torch.empty(size * size * 2, dtype=own.dtype), own)
    keep("all_gather_into_tensor", tensor)
    dist.reduce_scatter_tensor(tensor := torch.empty(2, dtype=own.dtype), own.clone())
    keep("reduce_scatter", tensor)
    dist.all_to_all_single(tensor := torch.empty_like(own), own)
    keep("all_to_all", tensor)
    sent = [number + 1 for number in range(size)]
    received = [rank + 1] * size
    rows = torch.arange(sum(sent))[:, None] + 1000 * rank
    dist.all_to_all_single(tensor := torch.empty(sum(received), 1, dtype=rows.dtype), rows, received, sent)
    keep("all_to_all of unequal rows", tensor)
    parts = [torch.empty_like(own) for _ in range(size)]
    dist.gather(own, parts if rank == 1 else None, 1)
    keep("gather", *(parts if rank == 1 else []))
    dist.scatter(tensor := torch.empty(2, dtype=own.dtype), list(own.view(size, 2).unbind()) if rank == 0 else None, 0)
    keep("scatter", tensor)
    dist.reduce(tensor := own.clone(), 1)
    keep("reduce", *([tensor] if rank == 1 else []))
    works = [dist.isend(own + number, (rank + 1) % size) for number in range(2)]
    for number in range(2):
        dist.recv(tensor := torch.empty_like(own), (rank - 1) % size)
        keep(f"recv {number}", tensor)
    for work in works:
        work.wait()
    sends = [dist.isend(own + number, (rank + 1) % size) for number in range(3)]
    here = [torch.empty_like(own) for _ in range(3)]
    receives = [dist.irecv(tensor, (rank - 1) % size) for tensor in here]
    for work in (*reversed(receives), *sends):
        work.wait()
    keep("waited for in another order", *here)
    dist.all_gather_object(objects := [None] * size, {"rank": rank})
    found["objects"] = objects
    pairs = [dist.new_group([first, first + 1]) for first in range(0, size - 1, 2)]
    if rank < 2 * len(pairs):
        dist.all_reduce(tensor := own.clone(), group=pairs[rank // 2])
        keep("pair", tensor)
    if size % 2 == 0:
        mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("rows", "columns"))
        matrix = torch.arange(24.0).view(6, 4)
        layout = distribute_tensor(matrix, mesh, [Shard(0), Shard(1)])
        product = layout @ distribute_tensor(matrix.T.contiguous(), mesh, [Replicate(), Shard(0)])
        keep("mesh", product.full_tensor())
    dist.barrier()
    return found


@pytest.mark.distributed
def test_collectives_give_what_gloo_gives(workers2: WorkerGroup) -> None:
    assert simulate(2, collectives) == workers2.run(collectives)


@pytest.mark.distributed
@pytest.mark.full
def test_collectives_give_what_gloo_gives_on_four(workers: Callable[[int], WorkerGroup]) -> None:
    assert simulate(4, collectives) == workers(4).run(collectives)


def state_of_its_own(seed: int) -> tuple[Any, ...]:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for seeded in (random.seed, np.random.seed, torch.manual_seed):
        seeded(seed + rank)
    dist.barrier()  # the other ranks seed theirs meanwhile
    drawn = random.random(), float(np.random.rand()), float(torch.rand(()))
    sys.modules["__main__"].own_rank = rank  # type: ignore[attr-defined]
    for variable in PROCESS_VARIABLES[-1:]:
        variable.owner["ranks"].append(rank)
        dist.barrier()
        return drawn, os.environ["RANK"], list(variable.owner["ranks"])
    raise AssertionError


def test_each_rank_has_its_own_generators_and_variables() -> None:
    owner: dict[str, Any] = {"ranks": []}
    each_process_has(owner, "ranks")
    before, module = torch.get_rng_state(), sys.modules["__main__"]
    try:
        found = simulate(3, state_of_its_own, 5)
    finally:
        PROCESS_VARIABLES.pop()
    for rank, (drawn, variable, ranks) in enumerate(found):
        random.seed(5 + rank)
        assert drawn[0] == random.random()
        assert drawn[1] == float(np.random.RandomState(5 + rank).rand())
        assert drawn[2] == float(torch.rand((), generator=torch.Generator().manual_seed(5 + rank)))
        assert (variable, ranks) == (str(rank), [rank])
    assert owner == {"ranks": []}
    assert torch.equal(torch.get_rng_state(), before)
    assert sys.modules["__main__"] is module
    assert "RANK" not in os.environ
    del module.own_rank  # type: ignore[attr-defined]


def another_collective() -> None:
    dist.init_process_group("gloo")
    dist.barrier() if dist.get_rank() == 2 else dist.all_reduce(torch.ones(3))


def another_size() -> None:
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(3 + dist.get_rank() // 2))


def one_does_not_come() -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() != 1:
        dist.all_reduce(torch.ones(3))


def received_but_never_sent() -> None:
    dist.init_process_group("gloo")
    dist.recv(torch.ones(3), (dist.get_rank() + 1) % dist.get_world_size())


def asked_in_vain() -> None:
    dist.init_process_group("gloo")
    if dist.get_rank():
        matched_calls.roll_call("train()", 1e9)
    else:
        dist.barrier()


def rows_that_do_not_fit() -> None:
    dist.init_process_group("gloo")
    dist.all_to_all_single(torch.empty(4), torch.empty(3), [1, 1, 2], [1, 1, 1])


@pytest.mark.parametrize(
    "function, says",
    [
        (another_collective, "rank 2 of group 0 calls barrier where rank 0 has called all_reduce of SUM, 3 float32"),
        (
            another_size,
            "rank 2 of group 0 calls all_reduce of SUM, 4 float32 where rank 0 has called all_reduce of SUM, 3",
        ),
        (one_does_not_come, "ranks 0, 2 wait in all_reduce of SUM, 3 float32 of 3 ranks; ranks 1 have returned"),
        (received_but_never_sent, "ranks 0 wait in recv of 3 float32 from rank 1 of group 0; ranks 1 wait in recv"),
        (asked_in_vain, "ranks 0 wait in barrier of 3 ranks; ranks 1 "),
        (rows_that_do_not_fit, "rank 2 of the group sends 1 elements to rank 0, which expects 2"),
    ],
)
def test_ranks_that_wait_for_ever_are_named(function: Callable[[], None], says: str) -> None:
    with pytest.raises(SimulationError) as caught:
        simulate(3, function)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def one_fails() -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        raise OSError("its disk is full")
    dist.barrier()


def test_the_error_of_the_rank_that_failed_is_raised() -> None:
    with pytest.raises(OSError, match="its disk is full"):
        simulate(3, one_fails)
    assert simulate(2, dist.is_initialized) == [False, False]


def bulletins() -> tuple[int, list[str | None]]:
    dist.init_process_group("gloo")
    board = bulletin.Bulletin()
    board.put(f"of {dist.get_rank()}", "hello")
    dist.barrier()
    return board.count("visits"), board.read([f"of {rank}" for rank in range(4)])


def test_the_store_is_that_of_a_job() -> None:
    simulation = Simulation(3)
    visits, read = zip(*simulation.run(bulletins), strict=True)
    assert sorted(visits) == [1, 2, 3]
    assert read == (["hello", "hello", "hello", None],) * 3
    assert len(set(simulation.store.requests.values())) == 1
    assert simulation.counts.names["barrier"] == 3


def test_only_a_version_that_was_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    with pytest.raises(StrategyError, match=r"^simulate: checked with torch 2\.15 only, this is torch 2\.99\.0"):
        simulate(2, one_fails)


def test_wrong_numbers() -> None:
    with pytest.raises(ConfigError, match=r"^world_size: 0 is not allowed"):
        Simulation(0)
