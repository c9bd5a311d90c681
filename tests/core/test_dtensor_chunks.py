"""DTensors whose part is several chunks: found, saved, loaded into every other layout, put together and cut."""

from __future__ import annotations

import functools
import inspect
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from flextrain.core.base.errors import CheckpointError
from flextrain.core.checkpoint import Checkpoint, save_checkpoint
from flextrain.core.checkpoint.chunks import chunks_of, cuts_of, fill, full_tensor, own_spans
from flextrain.core.comm import collectives as dist
from flextrain.testing import WorkerGroup

pytestmark = pytest.mark.distributed

Cut = Callable[[list[int]], list[list[int]]]


def chunks(indices: list[int], count: int) -> list[list[int]]:
    size = -(-len(indices) // count)
    return [indices[i * size : (i + 1) * size] for i in range(count)]


def packed(factor: int, count: int) -> Cut:
    return lambda indices: [
        list(itertools.chain(*(chunks(piece, count)[rank] for piece in chunks(indices, factor))))
        for rank in range(count)
    ]


@pytest.mark.parametrize("factor", [None, 1, 2, 3, 6])
def test_indices_are_those_of_cutting_one_axis_after_the_other(factor: int | None) -> None:
    """Tensor parallelism first, FSDP then; in one piece, in packed matrices, or in another order (None)."""
    own = Shard(0) if factor in (None, 1) else _StridedShard(0, split_factor=factor)
    for size, (dp, tp) in itertools.product(range(20), [(2, 2), (4, 2), (2, 4), (3, 2), (1, 2), (2, 1)]):
        whole = list(range(size))
        placements: list[Any] = [Shard(0) if factor is None else _StridedShard(0, split_factor=tp), own]
        for rank, index in itertools.product(range(dp), range(tp)):
            first, then = ((dp, rank), (tp, index)) if factor is None else ((tp, index), (dp, rank))
            expected = chunks(packed(factor or 1, first[0])(whole)[first[1]], then[0])[then[1]]
            runs = own_spans(size, 0, cuts_of(placements), (dp, tp), (rank, index))
            assert [i for begin, end in runs for i in range(begin, end)] == expected, (size, dp, tp, rank, index)
            assert all(end > begin for begin, end in runs)
            assert all(before[1] != after[0] for before, after in itertools.pairwise(runs)), "neighbours are one"


# On processes


@contextmanager
def group() -> Iterator[int]:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=world_size, init_method="env://", timeout_s=60)
    yield rank
    mesh_of.cache_clear()
    dist.destroy_process_group()


@functools.cache
def mesh_of(*shape: int) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[-len(shape) :])


Make = Callable[[Tensor], DTensor]


def after_fsdp(placement: Placement) -> Make:
    """A parameter that tensor parallelism has cut over half of the processes, and fully_shard then over two."""

    def make(whole: Tensor) -> DTensor:
        mesh = mesh_of(2, dist.get_world_size() // 2)
        holder = nn.Module()
        holder.p = nn.Parameter(distribute_tensor(whole, mesh["tp"], [placement], src_data_rank=None))
        fully_shard(holder, mesh=mesh["dp"])
        return holder.p.detach()  # type: ignore[return-value]

    return make


def direct(*placements: Placement) -> Make:
    def make(whole: Tensor) -> DTensor:
        size = dist.get_world_size()
        shape = (size,) if len(placements) == 1 else (2, size // 2)
        return distribute_tensor(whole, mesh_of(*shape), placements, src_data_rank=None)

    return make


SHAPES = [(9, 5), (3, 2), (1, 1), (7, 8, 2), (0, 4)]


def layouts() -> dict[str, Make]:
    return {
        "fsdp, columns": after_fsdp(Shard(0)),
        "fsdp, rows": after_fsdp(Shard(1)),
        "fsdp, packed by 2": after_fsdp(_StridedShard(0, split_factor=2)),
        "fsdp, packed by 3": after_fsdp(_StridedShard(0, split_factor=3)),
        "fsdp, packed along 1": after_fsdp(_StridedShard(1, split_factor=2)),
        "packed": direct(_StridedShard(0, split_factor=2)),
        "packed along 1": direct(_StridedShard(1, split_factor=3)),
        "packed, copied": direct(Replicate(), _StridedShard(0, split_factor=2)),
        "in one piece": direct(Shard(0)),
    }


def numbers(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    whole = torch.arange(1.0, 1.0 + torch.Size(shape).numel()).view(shape).to(dtype)
    if whole.numel() > 1:
        whole.view(-1)[1] = -0.0  # which a sum of numbers would lose
    return whole


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def wholes() -> dict[str, Tensor]:
    return {str(shape): numbers(shape, torch.float32) for shape in SHAPES} | {"bf16": numbers((14, 6), torch.bfloat16)}


def check(tensor: DTensor, whole: Tensor, where: Any) -> None:
    """This process's chunks are those of the whole."""
    for offsets, view in chunks_of(tensor).items():
        cut = whole[tuple(slice(o, o + n) for o, n in zip(offsets, view.shape, strict=True))]
        assert torch.equal(bits(view), bits(cut)), where


def write(path: Path) -> None:
    with group():
        for name, make in layouts().items():
            state = {key: make(whole.clone()) for key, whole in wholes().items()}
            for key, whole in wholes().items():
                assert sum(v.numel() for v in chunks_of(state[key]).values()) == state[key].to_local().numel()
                check(state[key], whole, (name, key))
                assert torch.equal(bits(full_tensor(state[key])), bits(whole)), (name, key)
            save_checkpoint(path / name, state)
            for key, whole in wholes().items():
                state[key].to_local().fill_(7)
                fill(state[key], whole)
                check(state[key], whole, (name, key))
        read(path)


def read(path: Path) -> None:
    """Everything that was saved into two layouts, on as many processes as there are now."""
    kinds = layouts()
    for number, saved in enumerate(kinds):
        for step in (0, 4):
            name, make = list(kinds.items())[(number + step) % len(kinds)]
            target = {key: make(torch.full_like(whole, 7)) for key, whole in wholes().items()}
            Checkpoint.open(path / saved).load(target)
            for key, whole in wholes().items():
                check(target[key], whole, (saved, name, key))


def read_in_group(path: Path) -> None:
    with group():
        read(path)


needs_layouts = pytest.mark.skipif(
    "src_data_rank" not in inspect.signature(distribute_tensor).parameters,
    reason="torch 2.6 cannot lay out a tensor without sending it",
)


@pytest.mark.slow
@needs_layouts
def test_every_layout_is_saved_and_loaded_into_others(workers: Callable[[int], WorkerGroup], tmp_path: Path) -> None:
    workers(4).run(write, tmp_path)
    for folder in tmp_path.iterdir():
        target = {key: torch.full_like(whole, 7) for key, whole in wholes().items()}
        Checkpoint.open(folder).load(target)
        for key, whole in wholes().items():
            assert torch.equal(bits(target[key]), bits(whole)), (folder.name, key)
    workers(2).run(read_in_group, tmp_path)


def stray(path: Path) -> str:
    with group() as rank:
        x = direct(_StridedShard(0, split_factor=2))(torch.zeros(8))
        y = DTensor.from_local(
            torch.zeros(4 + rank), x.device_mesh, x.placements, shape=(8,), stride=(1,), run_check=False
        )
        try:
            save_checkpoint(path / "x", {"x": y})
        except CheckpointError as error:
            return str(error)
        return "nothing"


@needs_layouts
def test_a_part_of_another_shape_is_refused(workers2: WorkerGroup, tmp_path: Path) -> None:
    for heard in workers2.run(stray, tmp_path):
        assert "could not be saved on rank 1: x: has a part of shape (5,)" in heard


def pending() -> float:
    with group():
        mesh = init_device_mesh("cpu", (1, dist.get_world_size()))
        tensor = DTensor.from_local(torch.full((2,), float(dist.get_rank() + 1)), mesh, [Shard(0), Partial()])
        with pytest.raises(ValueError, match="has a pending sum"):
            chunks_of(tensor)
        return full_tensor(tensor)[0].item()


def test_a_sum_that_is_pending_is_added_up_and_has_no_chunks(workers2: WorkerGroup) -> None:
    assert workers2.run(pending) == [3.0, 3.0]
