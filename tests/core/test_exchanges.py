"""Exchanges between all processes: their results, and that no process gets more than in proportion to the processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor

from flextrain.core.base.errors import DivergenceError, StrategyError
from flextrain.core.comm import collectives as dist
from flextrain.core.comm.agreement import all_same, collect, first_difference, gather_differing
from flextrain.core.comm.replica_check import ReplicaCheck
from flextrain.core.comm.topology import DataShard, Topology
from flextrain.testing.simulation import Simulation
from flextrain.testing.simulation.group_private import CHECKED

pytestmark = pytest.mark.skipif(
    Version(torch.__version__).release[:2] != CHECKED.release[:2],
    reason=f"ranks are simulated with torch {CHECKED} only",
)


def joined(function: Callable[..., Any], *args: Any) -> Any:
    """On a simulated rank: the result of a function that gets the rank."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=size, init_method="env://", timeout_s=30)
    before = MADE[0].counts.nbytes[rank]
    try:
        found = function(rank, *args)
    except (StrategyError, DivergenceError) as error:
        found = str(error)
    SPENT[rank] = MADE[0].counts.nbytes[rank] - before
    dist.destroy_process_group()
    return found


MADE: list[Simulation] = []
SPENT: dict[int, int] = {}


def on_ranks(size: int, function: Callable[..., Any], *args: Any) -> tuple[list[Any], list[int]]:
    """The results of all ranks, and the bytes that each has given to collectives and got from them."""
    MADE[:] = [Simulation(size)]
    SPENT.clear()
    found = MADE[0].run(joined, function, *args)
    return found, [SPENT[rank] for rank in range(size)]


@pytest.mark.parametrize("kinds", [1, 2, 3, 8])
def test_values_of_some_kinds(kinds: int) -> None:
    found, _ = on_ranks(8, lambda rank: gather_differing([rank % kinds, "x" * (rank % kinds)]))
    assert found == [[[rank % kinds, "x" * (rank % kinds)] for rank in range(8)]] * 8


def test_values_of_chosen_processes() -> None:
    found, _ = on_ranks(4, lambda rank: collect([2, 0, 3], {"rank": rank}, dist.side_group()))
    assert found == [[{"rank": 2}, {"rank": 0}, {"rank": 3}], None, None, None]


@pytest.mark.parametrize("stray", [None, 0, 3])
@pytest.mark.parametrize("bit", [0, 63, 64, 127])
def test_one_bit_makes_a_difference(stray: int | None, bit: int) -> None:
    def same(rank: int) -> bool:
        number = (2**128 - 1) // 3 ^ ((rank == stray) << bit)
        return all_same(number.to_bytes(16, "little"), dist.side_group())

    assert on_ranks(4, same)[0] == [stray is None] * 4


def test_differences_are_told_to_all() -> None:
    def differs(rank: int) -> str:
        return str(first_difference({"a": "1", "b": "2" if rank != 3 else "3"}, kind=str(rank % 2)))

    assert on_ranks(4, differs)[0] == ["b: is 2 on rank 1 and 3 on rank 3"] * 4
    assert on_ranks(4, lambda rank: first_difference({"a": str(rank % 2)}, kind=str(rank % 2)))[0] == [None] * 4


def topology(reports: Callable[[int], bool]) -> Callable[[int], None]:
    return lambda rank: Topology(DataShard(), reports=reports(rank)).check()


def test_a_shard_without_reports_is_told_to_all() -> None:
    found, _ = on_ranks(4, topology(lambda rank: rank != 2))
    assert found == [found[0]] * 4
    assert found[0].startswith(
        "Topology: (index, count) of the data and reports are [((0, 4), True), ((1, 4), True), ((2, 4), False)"
    )
    assert on_ranks(32, topology(lambda rank: rank != 20))[0][5].count("(") == 33
    assert on_ranks(4, topology(lambda rank: True))[0] == [None] * 4


def replicas(rank: int, *, stray: int | None, stages: int = 1) -> list[str]:
    """What a check has compared; of stages, each has tensors of its own, and all have one."""
    own: dict[str, Tensor] = {f"{rank % stages}.{n}": torch.full((3,), float(n)) for n in range(50)}
    own["everyone's"] = torch.ones(2)
    if rank == stray:
        own[f"{rank % stages}.7"] += 1
    return list(ReplicaCheck().check([own, {}], {}))


def test_replicas_are_compared() -> None:
    found, _ = on_ranks(4, lambda rank: replicas(rank, stray=None))
    assert [len(compared) for compared in found] == [51] * 4
    found, _ = on_ranks(4, lambda rank: replicas(rank, stray=2))
    assert len(set(found)) == 1
    assert (
        found[0].startswith("replicas differ: rank 2 differs from rank 0, 1, 3 in 0.7;") or "rank 2 differs" in found[0]
    )
    # No more than before: those of which some processes have no counterpart are left to the save.
    assert on_ranks(4, lambda rank: replicas(rank, stray=None, stages=2))[0] == [[]] * 4
    assert "rank 3 differ" in on_ranks(4, lambda rank: replicas(rank, stray=3, stages=2))[0][0]


EXCHANGES: dict[str, Callable[[int], Any]] = {
    "equal values": lambda rank: gather_differing(list(range(100))),
    "values of stages": lambda rank: gather_differing([rank % 4] * 100),
    "equal items": lambda rank: first_difference({"a": "b"}),
    "items of stages": lambda rank: first_difference({"a": str(rank % 4)}, kind=str(rank % 4)),
    "a stray": lambda rank: first_difference({"a": "b" * 100 if rank != 1 else "c"}),
    "objects": lambda rank: dist.gather_object("x" * 50, dist.side_group()) and None,
    "topology": topology(lambda rank: True),
    "equal replicas": lambda rank: replicas(rank, stray=None),
    "replicas of stages": lambda rank: replicas(rank, stray=None, stages=4),
}


@pytest.mark.parametrize("name", EXCHANGES)
def test_no_process_gets_more_than_in_proportion(name: str) -> None:
    """Rank 0 at most twice as much for twice as many processes, and any other hardly more."""
    few, many = (on_ranks(size, EXCHANGES[name])[1] for size in (8, 16))
    assert many[0] <= 2 * few[0]
    assert max(many[1:]) <= max(few[1:]) + 64
    assert min(few) > 0


def test_objects_of_any_length_are_gathered() -> None:
    found, _ = on_ranks(3, lambda rank: dist.gather_object({"rank": rank, "text": "x" * 10**rank}, dist.side_group()))
    assert found == [[{"rank": rank, "text": "x" * 10**rank} for rank in range(3)], None, None]
