"""Offers of real DTensors, on a group whose other ranks are not there: planned from them, parts are those of torch's planner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from flextrain.core.checkpoint.chunks import Cut, FlatShard, chunks_of_range, own_spans, share
from flextrain.core.checkpoint.save import _kinds
from flextrain.core.checkpoint.save_plan import Kind, Offer, SharedPlan, offer_of, plan_save, unpacked


@contextmanager
def being(rank: int, world_size: int) -> Iterator[None]:
    """One of many ranks; the others are not there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # which torch 2.6 needs to have been imported

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def dtensor(shape: tuple[int, ...], mesh: DeviceMesh, *placements: Placement) -> Tensor:
    """The shard of this rank, without values."""
    coordinates = mesh.get_coordinate()
    assert coordinates is not None
    cuts = [Cut(placement.dim) if isinstance(placement, Shard) else None for placement in placements]
    spans = [own_spans(size, dim, cuts, mesh.shape, coordinates) for dim, size in enumerate(shape)]
    local = torch.empty([sum(end - begin for begin, end in own) for own in spans], device="meta")
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def tensors_of(rank: int, world_size: int) -> dict[str, Tensor]:
    """Uneven rows, columns, replicas, two axes, a tied one, ordinary ones, and ranges of the elements."""
    line = init_device_mesh("cpu", (world_size,))
    inner = 2 if world_size % 2 == 0 else 1
    grid = init_device_mesh("cpu", (world_size // inner, inner), mesh_dim_names=("outer", "inner"))
    tied = dtensor((11, 2), line, Shard(0))
    found: dict[str, Tensor] = {
        "rows": dtensor((13, 3), line, Shard(0)),
        "short": dtensor((2, 3), line, Shard(0)),
        "columns": dtensor((3, 17), line, Shard(1)),
        "copies": dtensor((9, 2), grid, Replicate(), Shard(0)),
        "rows and columns": dtensor((7, 5), grid, Shard(0), Shard(1)),
        "inner": dtensor((6, 2), grid["inner"], Shard(0)),
        "tied": tied,
        "tied too": tied,
        "scalar": torch.zeros(()),
        "whole": torch.zeros(4, 2),
    }
    begin, end = share(35, world_size, rank)
    found["flat"] = FlatShard(torch.zeros(end - begin), (7, 5), begin)
    return found


Parts = Counter[tuple[str, tuple[int, ...], tuple[int, ...]]]


def parts_of_both(world_size: int) -> tuple[list[Parts], list[Parts]]:
    """What each rank writes by our plan, and by torch's."""
    offers, plans, flat = [], [], []
    for rank in range(world_size):
        with being(rank, world_size):
            tensors = tensors_of(rank, world_size)
            offers.append(offer_of(tensors, rank, world_size))
            part = tensors.pop("flat")
            assert isinstance(part, FlatShard)
            boxes = chunks_of_range((7, 5), part.start, part.start + part.to_local().numel())
            flat.append([("flat", *box) for box in boxes])
            plans.append(create_default_local_save_plan(tensors, is_coordinator=rank == 0))
            if rank:  # torch's ranks offer an ordinary tensor on the first of them alone
                whole = create_default_local_save_plan({k: t for k, t in tensors.items() if type(t) is Tensor}, True)
                plans[-1].items.extend(i for i in whole.items if i not in plans[-1].items)
    plan = planned(offers, world_size)
    planner: Any = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner({}, is_coordinator=True)
    final, _ = planner.create_global_plan(plans)
    theirs = [
        Counter(
            (item.index.fqn, tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes))
            for item in own.items
            if 0 not in item.tensor_data.chunk.sizes
        )
        + Counter(boxes)
        for own, boxes in zip(final, flat, strict=True)
    ]
    ours = [Counter((part.key, *part.box) for part in plan.parts_of(rank)) for rank in range(world_size)]
    return ours, theirs


def planned(offers: list[Offer], world_size: int) -> SharedPlan:
    kinds = _kinds([(offer.digest, offer.firsts) for offer in offers])
    return plan_save([Kind(k.ranks, unpacked(offers[k.ranks[0]].packed()), k.firsts) for k in kinds], world_size)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, pytest.param(64, marks=pytest.mark.full)])
def test_parts_of_real_tensors_are_those_of_torchs_planner(world_size: int) -> None:
    ours, theirs = parts_of_both(world_size)
    assert sum(ours, Counter()) == sum(theirs, Counter())
    replicated = {"copies", "inner", "scalar", "whole"}
    for own, other in zip(ours, theirs, strict=True):  # who writes what several have is ours to choose
        assert {p for p in own if p[0] not in replicated} == {p for p in other if p[0] not in replicated}
