"""Plans of saves from layouts alone: the parts that torch's planner gives each process, and their size at scale."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from flextrain.core.base.errors import CheckpointError
from flextrain.core.base.tensors import DTYPES
from flextrain.core.checkpoint.chunks import Cut, chunks_of_range, own_spans, share
from flextrain.core.checkpoint.folders import file_of
from flextrain.core.checkpoint.manifest import VALUES, Box, FileEntry, manifest_of, overlap, parse_manifest
from flextrain.core.checkpoint.save import _kinds
from flextrain.core.checkpoint.save_plan import (
    Boxes,
    EvenRange,
    Kind,
    Mesh,
    Offer,
    Offered,
    OnMesh,
    Range,
    SharedPlan,
    Whole,
    plan_save,
    unpacked,
)

Make = Callable[[int, int], Offer]
"""The offer of a rank in a world."""
ROWS, TWO, THREE = Cut(0), Cut(0, 2), Cut(0, 3)


def plan_of(make: Make, world_size: int) -> SharedPlan:
    """The plan of all ranks, which exchange what real ones do."""
    offers = [make(rank, world_size) for rank in range(world_size)]
    kinds = _kinds([(offer.digest, offer.firsts) for offer in offers])
    return plan_save([Kind(k.ranks, unpacked(offers[k.ranks[0]].packed()), k.firsts) for k in kinds], world_size)


# What torch's planner makes of the same tensors


def boxes_of(offer: Offer, tensor: Offered, rank: int, world_size: int) -> Iterator[Box]:
    """The chunks that a rank holds, computed from its own coordinates."""
    held, shape = tensor.held, tensor.shape
    if isinstance(held, Whole):
        yield (0,) * len(shape), shape
    elif isinstance(held, Boxes):
        yield from held.boxes
    elif isinstance(held, OnMesh):
        mesh, first = offer.meshes[held.mesh], offer.firsts[held.mesh]
        for number, at in enumerate(itertools.product(*map(range, mesh.shape))):
            own = mesh.ranks[number] if mesh.ranks else sum(x * y for x, y in zip(at, mesh.strides, strict=True))
            if first + own == rank:
                spans = [own_spans(size, dim, held.cuts, mesh.shape, at) for dim, size in enumerate(shape)]
                for chunk in itertools.product(*spans):
                    yield tuple(b for b, _ in chunk), tuple(e - b for b, e in chunk)
    else:
        begin, end = share(math.prod(shape), world_size, rank)
        start, length = held if isinstance(held, Range) else (begin, end - begin)
        yield from chunks_of_range(shape, start, start + length)


def planned_by_torch(make: Make, world_size: int) -> list[dict[tuple[str, tuple[int, ...]], tuple[int, ...]]]:
    """For each rank: (key, offsets) to sizes of what torch's planner lets it write."""
    plans = []
    for rank in range(world_size):
        offer = make(rank, world_size)
        items = [
            WriteItem(
                index=MetadataIndex(tensor.key, torch.Size(offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)),
                    properties=TensorProperties(dtype=DTYPES[tensor.dtype]),
                    size=torch.Size(tensor.shape),
                ),
            )
            for tensor in offer.tensors
            for offsets, sizes in boxes_of(offer, tensor, rank, world_size)
        ]
        plans.append(SavePlan(items))
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner({}, is_coordinator=True)
    final, _ = planner.create_global_plan(plans)
    return [
        {(item.index.fqn, tuple(item.index.offset)): tuple(item.tensor_data.chunk.sizes) for item in plan.items}
        for plan in final
    ]


# Tensors of many kinds


def sharded(key: str, shape: tuple[int, ...], *cuts: Cut | None, mesh: int = 0, dtype: str = "F32") -> Offered:
    return Offered(key, dtype, shape, OnMesh(mesh, cuts))


def fsdp(rank: int, world_size: int) -> Offer:
    """Rows that do not divide, fewer rows than processes, scalars, tied weights, tensors without elements."""
    tensors = (
        sharded("model.even", (64, 3), ROWS),
        sharded("model.uneven", (13, 3), ROWS),
        sharded("model.short", (2, 5), ROWS, dtype="BF16"),
        sharded("model.columns", (3, 17), Cut(1)),
        sharded("model.packed", (14, 2), THREE),
        sharded("model.packed columns", (2, 9), Cut(1, 2)),
        sharded("model.alias", (64, 3), ROWS),
        Offered("model.none", "F32", (0, 3), Whole()),
        Offered("optim.state.even.step", "F32", (), Whole()),
        Offered("model.buffer", "I64", (5,), Whole()),
    )
    return Offer(tensors, (Mesh((world_size,), None, (1,)),), (0,))


def two_axes(rank: int, world_size: int) -> Offer:
    """Two axes: replicas, tensor parallelism with FSDP after it, both on one dimension, and one that neither cuts."""
    inner = 2 if world_size % 2 == 0 else 1
    mesh = Mesh((world_size // inner, inner), None, (inner, 1))
    # FSDP comes second, and is the first axis: torch's _StridedShard says so.
    tensors = (
        sharded("hsdp", (9, 2), None, ROWS),
        sharded("hsdp of rows", (9, 2), ROWS, None),
        sharded("both", (13, 2), Cut(0, inner), ROWS),
        sharded("both, packed", (14, 2), Cut(0, inner), TWO if inner > 1 else ROWS),
        sharded("rows and columns", (7, 5), ROWS, Cut(1)),
        sharded("neither", (4,), None, None),
        sharded("of the inner axis", (6, 2), ROWS, mesh=1),
        Offered("step", "F32", (), Whole()),
    )
    return Offer(tensors, (mesh, Mesh((inner,), None, (1,))), (0, rank // inner * inner))


def zero(rank: int, world_size: int) -> Offer:
    """ZeRO-3's even shares of the flattened parameters, and ZeRO-1's ranges of one long vector of them."""
    shapes = {"a": (7, 5), "b": (3,), "c": (2, 3, 4), "d": (), "e": (1, 11)}
    tensors = [Offered(f"even.{name}", "F32", shape, EvenRange()) for name, shape in shapes.items()]
    length = -(-sum(map(math.prod, shapes.values())) // world_size)
    at = 0
    for name, shape in shapes.items():
        numel = math.prod(shape)
        begin, end = max(rank * length, at), min((rank + 1) * length, at + numel)
        if begin < end:
            tensors.append(Offered(f"flat.{name}", "BF16", shape, Range(begin - at, end - begin)))
            tensors.append(Offered(f"flat.{name}.step", "F32", (), Whole()))
        at += numel
    return Offer(tuple(tensors), (), ())


def stages(rank: int, world_size: int) -> Offer:
    """Stages with different tensors, a tied one on both ends, a buffer of one process, chunks that follow no rule."""
    half = -(-world_size // 2)
    stage, first = (0, 0) if rank < half else (1, half)
    size = half if stage == 0 else world_size - half
    begin, end = share(9, world_size, rank)
    tensors = [
        sharded(f"stage {stage}", (11, 2), ROWS),
        Offered("tied", "F32", (3, 2), Whole()),
        Offered("listed", "F32", (9, 2), Boxes((((begin, 0), (end - begin, 2)),) if begin < end else ())),
    ]
    if rank == world_size - 1:
        tensors.append(Offered("buffer", "F32", (3,), Whole()))
    return Offer(tuple(tensors), (Mesh((size,), None, (1,)),), (first,))


def crooked(rank: int, world_size: int) -> Offer:
    """A mesh whose ranks are in no even order: rank 0 comes last."""
    mesh = Mesh((world_size,), (*range(world_size - 1), -1), ())
    if world_size < 3:
        mesh = Mesh((world_size,), None, (1 - world_size,))
    return Offer((sharded("x", (2 * world_size + 1, 3), ROWS),), (mesh,), (min(1, world_size - 1),))


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("make", [fsdp, two_axes, zero, stages, crooked])
def test_parts_are_those_of_torchs_planner(make: Make, world_size: int) -> None:
    plan, expected = plan_of(make, world_size), planned_by_torch(make, world_size)
    found = [{(part.key, part.box[0]): part.box[1] for part in plan.parts_of(rank)} for rank in range(world_size)]
    together = Counter(part for parts in found for part in parts.items())
    # torch writes chunks without elements too.
    theirs = Counter(
        part for parts in expected for part in parts.items() if 0 not in part[1] or part[0][0] == "model.none"
    )
    assert together == theirs
    assert set(together.values()) == {1}
    offered = [make(rank, world_size) for rank in range(world_size)]
    for rank, parts in enumerate(found):
        own = {(t.key, box) for t in offered[rank].tensors for box in boxes_of(offered[rank], t, rank, world_size)}
        assert {(key, (offsets, sizes)) for (key, offsets), sizes in parts.items()} <= own, "it writes what it holds"


@pytest.mark.parametrize("world_size", [1, 3, 8])
@pytest.mark.parametrize("make", [fsdp, two_axes, zero, stages, crooked])
def test_the_index_gives_the_parts_back(make: Make, world_size: int) -> None:
    plan = plan_of(make, world_size)
    names = [VALUES, *map(file_of, range(world_size))]
    text = manifest_of(plan.tensors, dict.fromkeys(names, FileEntry(size=10**6, xxh3="0" * 16)), {"strategy": "x"})
    entries = parse_manifest(text).entries
    assert list(entries) == list(plan.tensors)
    for rank in range(world_size):
        for part in plan.parts_of(rank):
            entry = entries[part.key]
            chunks = [c for c in entry.chunks if c.file == file_of(rank) and c.name == part.name]
            assert [(c.offsets, c.shape) for c in chunks] == [part.box]
    for entry in entries.values():
        chunks = entry.chunks
        assert entry.chunk_count == len(chunks)
        for wanted in windows(entry.shape):
            touched = {(c.file, c.offsets) for c in chunks if overlap((c.offsets, c.shape), wanted) is not None}
            assert {(c.file, c.offsets) for c in entry.overlapping(wanted)} == touched


def windows(shape: Sequence[int]) -> Iterator[Box]:
    """Parts of a tensor: all, the first and the last element, and some in between."""
    if not math.prod(shape):
        return
    yield (0,) * len(shape), tuple(shape)
    yield (0,) * len(shape), (1,) * len(shape)
    yield tuple(size - 1 for size in shape), (1,) * len(shape)
    yield tuple(size // 3 for size in shape), tuple(size - size // 3 for size in shape)
    yield tuple(size // 2 for size in shape), tuple(max(1, size // 4) for size in shape)


def replicated(rank: int, world_size: int) -> Offer:
    tensors = [Offered(f"w{number}", "F32", (number + 1, 10), Whole()) for number in range(100)]
    return Offer(tuple(tensors), (), ())


def copies_of_shards(rank: int, world_size: int) -> Offer:
    tensors = tuple(sharded(f"w{number}", (8 * (number % 7 + 1), 10), None, ROWS) for number in range(100))
    return Offer(tensors, (Mesh((world_size // 2, 2), None, (2, 1)),), (0,))


@pytest.mark.parametrize("make", [replicated, copies_of_shards])
def test_what_is_replicated_is_dealt_out_evenly(make: Make) -> None:
    plan = plan_of(make, 8)
    loads = [sum(4 * math.prod(part.box[1]) for part in plan.parts_of(rank)) for rank in range(8)]
    assert max(loads) < 1.02 * sum(loads) / 8
    by_torch = [sum(4 * math.prod(sizes) for sizes in parts.values()) for parts in planned_by_torch(make, 8)]
    assert max(loads) <= max(by_torch)


# What does not fit together


def one(shape: tuple[int, ...], dtype: str = "F32", held: Any = None) -> Offer:
    return Offer(
        (Offered("model.w", dtype, shape, Whole() if held is None else held),), (Mesh((3,), None, (1,)),), (0,)
    )


@pytest.mark.parametrize(
    "common, stray, message",
    [
        (one((4, 2)), one((4, 3)), "model.w: is F32 (4, 3) on rank 1, and F32 (4, 2) on rank 0, 2"),
        (one((4, 2)), one((4, 2), "BF16"), "model.w: is BF16 (4, 2) on rank 1, and F32 (4, 2) on rank 0, 2"),
        (one((4, 2)), one((4, 2), held=OnMesh(0, (ROWS,))), "rank 1 has (S0) over a mesh of (3,)"),
        (
            one((6,), held=OnMesh(0, (ROWS,))),
            one((6,), held=OnMesh(0, (TWO,))),
            "rank 1 has (S0/2) over a mesh of (3,)",
        ),
        (one((6,), held=OnMesh(0, (ROWS,))), Offer((), (), ()), "model.w: its chunks are not all there"),
        (one((6,), held=EvenRange()), Offer((), (), ()), "model.w: its chunks are not all there"),
        (one((6,), held=EvenRange()), one((6,), held=Range(0, 2)), "rank 1 has elements 0 to 2"),
    ],
)
def test_a_rank_whose_layout_differs_is_named(common: Offer, stray: Offer, message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        plan_of(lambda rank, _: stray if rank == 1 else common, 3)
    assert message in str(caught.value)


# At scale


def llama_70b() -> dict[str, tuple[int, ...]]:
    hidden, inner, kv = 8192, 28672, 1024
    shapes: dict[str, tuple[int, ...]] = {"embed": (32000, hidden), "head": (32000, hidden), "norm": (hidden,)}
    block = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    return shapes | {f"layers.{n}.{name}": shape for n in range(80) for name, shape in block.items()}


def adamw(held: Callable[[str, tuple[int, ...]], Any]) -> tuple[Offered, ...]:
    found = []
    for name, shape in llama_70b().items():
        for key in (
            f"model.{name}.weight",
            f"optim.state.{name}.weight.exp_avg",
            f"optim.state.{name}.weight.exp_avg_sq",
        ):
            found.append(Offered(key, "F32", shape, held(name, shape)))
        found.append(Offered(f"optim.state.{name}.weight.step", "F32", (), Whole()))
    return tuple(found)


WORLD = 4096
EVERYONE = Mesh((WORLD,), None, (1,))
GRID = Mesh((WORLD // 8, 8), None, (8, 1))
BEFORE = {
    "fsdp": (adamw(lambda *_: OnMesh(0, (ROWS,))), (EVERYONE,)),
    "tensor parallelism and fsdp": (adamw(lambda *_: OnMesh(0, (Cut(0, 8), ROWS))), (GRID,)),
    "replicas of shards": (adamw(lambda *_: OnMesh(0, (None, ROWS))), (GRID,)),
    "replicas": (adamw(lambda *_: Whole()), ()),
    "zero": (adamw(lambda *_: EvenRange()), ()),
}


@pytest.mark.parametrize("kind", BEFORE)
def test_a_save_of_4096_processes_is_planned_from_layouts(kind: str) -> None:
    """AdamW's state of 70B parameters: CPU seconds of one process, and the size of the index."""
    tensors, meshes = BEFORE[kind]
    begin = time.process_time()
    offer = Offer(tensors, meshes, tuple(0 for _ in meshes))
    kinds = _kinds([(offer.digest, offer.firsts)] * WORLD)
    assert len(kinds) == 1
    plan = plan_save([Kind(kinds[0].ranks, offer, kinds[0].firsts)], WORLD)
    own = plan.parts_of(1234)
    names = [VALUES, *map(file_of, range(WORLD))]
    files = dict.fromkeys(names, FileEntry(size=10**13, xxh3="0" * 16))
    text = manifest_of(plan.tensors, files, {})
    print(f"{kind}: {time.process_time() - begin:.2f} s, {len(text) / 2**20:.2f} MiB, {len(own)} parts of one process")
    assert len(text) < 2**20
    loads: NDArray[np.int64] = np.zeros(WORLD, dtype=np.int64)
    for tensor in plan.tensors.values():
        ranks, numel = tensor.layout.sizes(tensor.shape)
        np.add.at(loads, ranks + tensor.rank, numel * 4)
    assert loads.sum() == sum(4 * math.prod(t.shape) for t in tensors), "each element once"
    largest = max(math.prod(shape) for shape in llama_70b().values()) * 4
    assert loads.max() <= max(largest, 1.07 * loads.mean()), "no process writes much more than others"
    assert json.loads(text)["version"] == 2
