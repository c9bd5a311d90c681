"""Owners of matrices of which processes hold ranges of the flattened parameter, in float64 and without a strategy."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flextrain import FSDPStrategy, OptimWrapper, SingleDeviceStrategy, StrategyError
from flextrain.core.checkpoint.chunks import FlatShard, Ranges
from flextrain.core.comm import collectives as dist
from flextrain.optim.muon import Muon
from flextrain.optim.owner_adapters import WholeAdapter
from flextrain.optim.owners import Matrix, OwnerExchange

from ..conftest import WorkerFactory

CPU = torch.device("cpu")
SHAPES = ((7, 5), (6, 9), (4, 3, 5), (1, 8), (12, 2))
PARTS = (dict(part_sizes=(3, 4)), dict(part_sizes=(4, 5), part_dim=1), dict(stacked=True), {}, {})
"""Settings of the groups: rows and columns that are joined, and a stack of matrices."""


def shards_of(whole: Tensor, ends: Sequence[int], rank: int) -> FlatShard:
    """A process's range of a tensor that is cut at these positions."""
    ranges = tuple(pairwise(ends))
    begin, end = ranges[rank]
    return FlatShard(whole.reshape(-1)[begin:end].clone(), whole.shape, begin, Ranges(ranges, CPU))


def cuts(numel: int, count: int, draw: random.Random) -> list[int]:
    """Where a flattened tensor is cut for so many processes, some of which may have nothing."""
    return [0, *sorted(draw.randint(0, numel) for _ in range(count - 1)), numel]


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_an_owner_knows_every_element_once(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    draw = random.Random(count)
    monkeypatch.setattr("flextrain.optim.owners._group", lambda *_: None)
    spanning = 0
    for shape in SHAPES * 10:
        whole = torch.arange(math.prod(shape), dtype=torch.float64).view(shape)
        ends = cuts(whole.numel(), count, draw)
        shards = [shards_of(whole, ends, rank) for rank in range(count)]
        lows = [draw.randrange(size) for size in shape]
        spans = tuple((low, draw.randint(1, size - low)) for low, size in zip(lows, shape, strict=True))
        matrix = Matrix(shards[0], spans)
        for rank in range(count):  # as the owner knows it
            monkeypatch.setattr("flextrain.optim.owners.index_among", lambda _, rank=rank: rank)
            OwnerExchange([matrix], torch.float64, 2**20)
            if matrix.owner == rank:
                break
        found = torch.full(matrix.shape, -1.0, dtype=torch.float64)
        for rank, chunks in matrix.chunks.items():
            for chunk in chunks:
                part = chunk.of(shards[rank].to_local())
                assert tuple(part.shape) == chunk.shape
                target = found
                for dim, (begin, length) in enumerate(chunk.matrix):
                    target = target.narrow(dim, begin, length)
                assert bool((target == -1).all())
                target.copy_(part)
        expected = whole
        for dim, (begin, length) in enumerate(spans):
            expected = expected.narrow(dim, begin, length)
        assert torch.equal(found, expected)
        spanning += sum(bool(chunks) for chunks in matrix.chunks.values()) > 2
    assert spanning > 0 or count < 3


class Slowing(torch.optim.Optimizer):
    """Counts its updates in a tensor of its group."""

    owns_whole = True

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, dict(lr=lr, updates=torch.zeros(())))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["updates"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"] / float(group["updates"]))


def test_what_a_group_counts_in_a_tensor_counts_once() -> None:
    wholes = [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in SHAPES[:2]]
    shards = [shards_of(whole.detach(), [0, whole.numel()], 0) for whole in wholes]
    alone, shared = Slowing(wholes), Slowing(shards)
    adapter = WholeAdapter(shared, "optim_wrapper")
    assert adapter.steps_in_parts
    for _ in range(3):
        for whole, shard in zip(wholes, shards, strict=True):
            whole.grad = torch.randn_like(whole)
            shard.grad = shards_of(whole.grad, [0, whole.numel()], 0)
        alone.step()
        with adapter.stepping():
            shared.step()
    assert [float(each.param_groups[0]["updates"]) for each in (alone, shared)] == [3.0, 3.0]
    for whole, shard in zip(wholes, shards, strict=True):
        torch.testing.assert_close(shard.full_tensor(), whole.detach())


class OfAll(Slowing):
    """Divides by the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        trained = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in trained]).norm() if trained else 1.0  # type: ignore[union-attr]
        for parameter in trained:
            parameter.sub_(parameter.grad / norm, alpha=0.1)


class OfEach(Slowing):
    """Divides by the norm of the parameter's own gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            parameter.sub_(parameter.grad / parameter.grad.norm(), alpha=0.1)


@pytest.mark.parametrize("kind, is_allowed", [(OfEach, True), (OfAll, False)])
def test_an_update_that_depends_on_other_parameters_is_refused(kind: type[Slowing], is_allowed: bool) -> None:
    model = nn.Linear(6, 4)
    wrapper = OptimWrapper(dict(type=kind))
    strategy = FSDPStrategy(device="cpu")
    try:
        if is_allowed:
            strategy.setup(model, wrapper)
        else:
            with pytest.raises(StrategyError, match="OfAll updates a parameter otherwise beside others than alone"):
                strategy.setup(model, wrapper)
    finally:
        strategy.leave()
    SingleDeviceStrategy(device="cpu").setup(nn.Linear(6, 4), OptimWrapper(dict(type=kind)))


def muon_on_ranges(size: int) -> float:
    """The largest difference of Muon's weights from those of one device, after some updates."""
    torch.set_num_threads(1)
    draw, rank = random.Random(5), int(os.environ["RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=size, init_method="env://", timeout_s=60)
    torch.manual_seed(1)
    wholes = [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in SHAPES]
    ends = [cuts(whole.numel(), size, draw) for whole in wholes]
    shards = [shards_of(whole.detach(), own, rank) for whole, own in zip(wholes, ends, strict=True)]
    options: dict[str, Any] = dict(lr=0.02, ns_dtype="float64", bucket_mb=1e-4)
    alone = Muon([{"params": [p], **own} for p, own in zip(wholes, PARTS, strict=True)], **options)
    shared = Muon([{"params": [p], **own} for p, own in zip(shards, PARTS, strict=True)], **options)
    for _ in range(5):
        for whole, shard, own in zip(wholes, shards, ends, strict=True):
            whole.grad = torch.randn_like(whole)
            shard.grad = shards_of(whole.grad, own, rank)
        alone.step()
        shared.step()
    found = max(float((s.full_tensor() - w.detach()).abs().max()) for s, w in zip(shards, wholes, strict=True))
    dist.destroy_process_group()
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.full)])
def test_muon_of_ranges_is_that_of_one_device(workers: WorkerFactory, size: int) -> None:
    assert max(workers(size).run(muon_on_ranges, size)) < 1e-12
