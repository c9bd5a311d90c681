"""Attention over a sequence that several processes share equals attention on one device, forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from flextrain import MeshStrategy
from flextrain.core.comm import collectives as dist
from flextrain.strategies.mesh.axis import own_random_numbers
from flextrain.strategies.mesh.context import masks
from flextrain.strategies.mesh.context.attention import SequenceAttention
from flextrain.strategies.mesh.context.batches import SequenceShards
from flextrain.strategies.mesh.context.masks import CAUSAL, FULL, Mask, Rule
from flextrain.testing import WorkerGroup

from ..device import DEVICE

RULES = [CAUSAL, FULL, Rule(True, 5), Rule(False, 3)]
# Absolute: results are of the order of 1. Sums are in float32 for bfloat16, whose results have 8 bits.
TOLERANCE = {torch.float64: 1e-14, torch.float32: 5e-6, torch.bfloat16: 4e-2}


@pytest.mark.parametrize("length, count, balanced", [(12, 2, True), (16, 4, True), (6, 2, False), (12, 4, False)])
def test_shards_are_the_whole_sequence(length: int, count: int, balanced: bool) -> None:
    shards = SequenceShards(length, count, balanced)
    whole = torch.arange(2 * length).view(2, length)
    cut = [shards.cut(whole, 1, index) for index in range(count)]
    assert torch.equal(shards.join(cut, 1), whole)
    # Pairs of a causal mask: equal work for all, if balanced.
    work = [sum(int(position) + 1 for position in part[0]) for part in cut]
    assert (len(set(work)) == 1) == balanced


@pytest.mark.parametrize("rule", RULES)
def test_tiles_are_the_mask(rule: Rule) -> None:
    at = torch.arange(24)
    whole = rule.allows(at[:, None], at[None]).expand(24, 24)
    for rows in [(start, start + 4) for start in range(0, 24, 4)]:
        for columns in [(start, start + 6) for start in range(0, 24, 6)]:
            expected = whole[rows[0] : rows[1], columns[0] : columns[1]]
            found = Mask(rule).tile(rows, columns, torch.device("cpu"))
            if isinstance(found, bool):
                assert bool(expected.all()) is found
                assert bool(expected.any()) is found
            else:
                assert torch.equal(found[0, 0], expected)


def attend(kind: str, dtype: torch.dtype) -> None:
    """In a worker: compare every mask, with more heads of queries than of keys, another width of values, and a scale."""
    torch.set_num_threads(1)
    strategy = MeshStrategy(device=DEVICE, cp=-1)
    strategy.join()
    mesh = strategy.layout.over("cp")
    with pytest.MonkeyPatch.context() as patch, torch.device(DEVICE):
        patch.setattr(masks, "TILE", 5)
        for rule in RULES:
            for has_documents in (False, True):
                _compare(SequenceAttention(kind, mesh), rule, has_documents, dtype)
    strategy.leave()
    dist.destroy_process_group()


def _compare(attention: SequenceAttention, rule: Rule, has_documents: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    length = 16 * attention.count
    shards, index = attention.shards(length), attention.index
    heads = 8 // attention.count  # of keys: with Ulysses two for a process, or one for two processes
    query, key = torch.randn(2, 8, length, 8, dtype=dtype), torch.randn(2, heads, length, 8, dtype=dtype)
    value, gradient = torch.randn(2, heads, length, 6, dtype=dtype), torch.randn(2, 8, length, 6, dtype=dtype)
    at = torch.arange(length)
    allowed = rule.allows(at[:, None], at[None]).expand(2, 1, length, length)
    mask = Mask(rule)
    if has_documents:
        counted = torch.ones(2, length, dtype=torch.bool)
        counted[0, :7], counted[1, -9:] = False, False  # under a causal mask some attend to none
        documents = (at // 11).expand(2, -1)
        mask = Mask(rule, counted, documents)
        allowed = allowed & counted[:, None, None] & (documents[:, None, :, None] == documents[:, None, None])
    whole = [tensor.double().requires_grad_() for tensor in (query, key, value)]
    expected = functional.scaled_dot_product_attention(*whole, attn_mask=allowed, scale=0.3, enable_gqa=True)
    own = [shards.cut(tensor, 2, index).clone().requires_grad_() for tensor in (query, key, value)]
    found = attention(own[0], own[1], own[2], mask, 0.3, 0.0, "test")
    assert found.dtype == dtype
    gradients = torch.autograd.grad(found, own, shards.cut(gradient, 2, index))
    for mine, other in zip(
        (found, *gradients), (expected, *torch.autograd.grad(expected, whole, gradient.double())), strict=True
    ):
        torch.testing.assert_close(mine.double(), shards.cut(other, 2, index), rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.distributed
@pytest.mark.parametrize(
    "world_size, kind, dtype",
    [
        pytest.param(2, "ring", torch.float64, id="ring2-float64"),
        pytest.param(2, "ulysses", torch.float64, id="ulysses2-float64"),
        pytest.param(2, "ring", torch.bfloat16, id="ring2-bfloat16", marks=pytest.mark.full),
        pytest.param(2, "ulysses", torch.bfloat16, id="ulysses2-bfloat16", marks=pytest.mark.full),
        pytest.param(4, "ring", torch.float64, id="ring4-float64", marks=pytest.mark.full),
        pytest.param(4, "ring", torch.float32, id="ring4-float32", marks=pytest.mark.full),
        pytest.param(4, "ulysses", torch.float32, id="ulysses4-float32", marks=pytest.mark.full),
    ],
)
def test_attention(workers: Callable[[int], WorkerGroup], world_size: int, kind: str, dtype: torch.dtype) -> None:
    workers(world_size).run(attend, kind, dtype)


def with_dropout(is_broken: bool) -> Tensor:
    """In a worker: the outputs of all heads, which are alike, at this process's positions, where all of attention drops out."""
    dist_mesh = _mesh()
    torch.manual_seed(0)
    attention = SequenceAttention("ulysses", dist_mesh)
    one = torch.randn(1, 1, 8, 4, device=DEVICE).expand(1, 4, 8, 4)
    with own_random_numbers(DEVICE, 0 if is_broken else attention.index):
        found = attention(one, one, one, Mask(FULL), None, 0.5, "test")
    dist.destroy_process_group()
    return found


def _mesh() -> torch.distributed.device_mesh.DeviceMesh:
    strategy = MeshStrategy(device=DEVICE, cp=2)
    strategy.join()
    return init_device_mesh(DEVICE, (2,), mesh_dim_names=("cp",))


@pytest.mark.distributed
def test_masks_of_dropout_are_not_repeated_across_heads(workers2: WorkerGroup) -> None:
    first = workers2.run(with_dropout, False)[0][0]
    assert len({tuple(head.flatten().tolist()) for head in first}) == 4
    first = workers2.run(with_dropout, True)[0][0]
    assert len({tuple(head.flatten().tolist()) for head in first}) == 2  # heads 2 and 3, which the other process has
