"""FlatShard: chunks of a flat range, saved and loaded in place under any other split."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flextrain.core.base.errors import CheckpointError
from flextrain.core.checkpoint import Checkpoint, FlatShard, save_checkpoint
from flextrain.core.checkpoint.chunks import chunks_of_range

SHAPES: list[tuple[int, ...]] = [
    (), (1,), (5,), (0,), (3, 4), (1, 6), (6, 1), (0, 3), (2, 3, 4), (3, 1, 2), (1, 1, 1), (2, 2, 3, 2), (1, 3, 1, 4),
]  # fmt: skip


def numbers(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(math.prod(shape), dtype=dtype).view(shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rectangles_are_the_range_for_every_range(shape: tuple[int, ...]) -> None:
    whole = numbers(shape)
    flat = whole.reshape(-1)
    for start, end in itertools.combinations_with_replacement(range(flat.numel() + 1), 2):
        found = list(chunks_of_range(shape, start, end))
        assert len(found) <= max(1, 2 * len(shape) - 1)
        chunks = []
        for offsets, sizes in found:
            place = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
            chunks.append(whole[place].reshape(-1))
            assert all(n > 0 for n in sizes)
        assert torch.equal(torch.cat([*chunks, torch.empty(0)]), flat[start:end])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_parts_are_views(shape: tuple[int, ...]) -> None:
    size = math.prod(shape)
    for start, end in itertools.combinations_with_replacement(range(size + 1), 2):
        local = torch.zeros(end - start)
        shard = FlatShard(local, shape, start)
        assert tuple(shard.shape) == shape
        for part in shard.chunks().values():
            part += 1
        assert local.tolist() == [1.0] * (end - start)
        assert sum(part.numel() for part in shard.chunks().values()) == end - start


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_round_trip_through_a_checkpoint_to_every_other_range(
    tmp_path: Path, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    whole = numbers(shape, dtype)
    save_checkpoint(tmp_path / "c", {"flat": FlatShard(whole.reshape(-1), shape, 0), "plain": whole})
    checkpoint = Checkpoint.open(tmp_path / "c")
    ranges = list(itertools.combinations_with_replacement(range(whole.numel() + 1), 2))
    for start, end in ranges[:: max(1, len(ranges) // 12)]:
        locals_ = {key: torch.full((end - start,), -1, dtype=dtype) for key in ("flat", "plain")}
        checkpoint.load({key: FlatShard(local, shape, start) for key, local in locals_.items()})
        for local in locals_.values():
            assert torch.equal(local, whole.reshape(-1)[start:end])
    target = torch.full(shape, -1, dtype=dtype)
    checkpoint.load({"flat": target})
    assert torch.equal(target, whole)


def test_a_shard_of_another_shape_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c", {"x": FlatShard(torch.zeros(6), (2, 3), 0)})
    with pytest.raises(CheckpointError, match=r"x has shape \(2, 3\), shape \(3, 2\) is needed"):
        Checkpoint.open(tmp_path / "c").load({"x": FlatShard(torch.zeros(6), (3, 2), 0)})


def test_wrong_ranges() -> None:
    with pytest.raises(ValueError, match=r"^start: 3 to 5 lies outside of shape \(2, 2\)"):
        FlatShard(torch.zeros(2), (2, 2), 3)
    with pytest.raises(ValueError, match="^local: must be one-dimensional"):
        FlatShard(torch.zeros(2, 2), (2, 2), 0)


def test_elementwise_operations_work_on_the_range() -> None:
    local = torch.tensor([1.0, 2.0])
    shard = FlatShard(local, (2, 3), 1)
    copy = shard.clone()
    assert isinstance(copy, FlatShard)
    assert (copy.start, copy.shape) == (1, (2, 3))
    assert copy.to(torch.bfloat16).to_local().dtype is torch.bfloat16
    assert shard.detach().to_local().data_ptr() == local.data_ptr()
    copy.copy_(torch.zeros_like(shard))
    assert shard.lerp_(copy, 0.5) is shard
    assert local.tolist() == [0.5, 1.0]
    assert repr(shard) == "FlatShard([1:3] of (2, 3), torch.float32, cpu)"
    with pytest.raises(NotImplementedError, match="use to_local"):
        shard.sum()
    with pytest.raises(ValueError, match="the same slice"):
        shard.copy_(FlatShard(local, (2, 3), 2))
    with pytest.raises(ValueError, match="the same slice"):
        shard.copy_(torch.zeros(2, 3))
