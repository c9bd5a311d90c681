"""Replicas that differ are refused, by name and rank, and never mixed in one checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from flextrain.core.base.errors import CheckpointError
from flextrain.core.base.tensors import fingerprints, of_bits
from flextrain.core.checkpoint import Checkpoint, Staging, is_checkpoint, save_checkpoint, save_in_background
from flextrain.core.checkpoint.replicas import Replicas, Summaries, share_of
from flextrain.core.comm import collectives as dist
from flextrain.testing import WorkerGroup


def state() -> dict[str, Tensor]:
    """Of many kinds, the same on every process; with NaN, an empty one, and one whose memory has gaps."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(37, 50, generator=generator)
    whole[3, 4] = float("nan")
    found = {f"of {dtype}": whole.to(dtype) for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)}
    found |= {"of bytes": (whole * 9).to(torch.int8), "of bools": whole > 0, "of counters": torch.tensor(3)}
    return {**found, "empty": torch.zeros(0, 3), "transposed": whole.t(), "parameter": nn.Parameter(whole.clone())}


def flipped(tensor: Tensor, at: int) -> Tensor:
    """Another tensor, in which one bit of one element is the other way round."""
    changed = tensor.detach().clone().contiguous()
    changed.reshape(-1).view(torch.uint8)[at * changed.itemsize] ^= 1
    return changed


@contextmanager
def group(world_size: int = 2) -> Iterator[int]:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=world_size, init_method="env://", timeout_s=30)
    try:
        yield rank
    finally:
        dist.destroy_process_group()


def saves(folder: Path, stray: str | None, at: int, background: bool) -> list[str]:
    """What the first save says, and the second one, when from then on rank 1's ``stray`` has another bit."""
    said, staging = [], Staging()
    with group() as rank:
        own = state()
        if rank == 0:
            own["buffer"] = torch.ones(3)  # of which others have their own, and offer none
        for name in ("first", "second"):
            try:
                if background:
                    save_in_background(folder / name, own, staging=staging).wait()
                else:
                    save_checkpoint(folder / name, own, staging=staging)
                said.append("")
            except CheckpointError as error:
                said.append(str(error))
            if stray is not None and rank == 1:
                own[stray] = flipped(own[stray], at)
    return said


@pytest.mark.distributed
@pytest.mark.parametrize("background", [False, True])
def test_equal_replicas_are_saved(workers2: WorkerGroup, tmp_path: Path, background: bool) -> None:
    assert workers2.run(saves, tmp_path, None, 0, background) == [["", ""]] * 2
    assert Checkpoint.open(tmp_path / "second").tensors.keys() == {*state(), "buffer"}


@pytest.mark.distributed
@pytest.mark.parametrize("background", [False, True])
# Some of these rank 0 writes, some rank 1: it has to be noticed of either's.
@pytest.mark.parametrize(
    ("stray", "at"),
    [("of torch.float32", 1849), ("of torch.bfloat16", 0), ("parameter", 154), ("of counters", 0), ("transposed", 7)],
)
def test_replicas_that_differ_are_refused(
    workers2: WorkerGroup, tmp_path: Path, stray: str, at: int, background: bool
) -> None:
    for first, second in workers2.run(saves, tmp_path, stray, at, background):
        assert first == ""
        assert f"second: could not be saved on rank 0: {stray} differs between processes, rank 1 from rank 0" in second
        assert "\n" not in second
    assert is_checkpoint(tmp_path / "first")
    assert not is_checkpoint(tmp_path / "second")
    assert [path.name for path in tmp_path.iterdir()] == ["first"]  # nothing is left of it


def saves_copies(folder: Path, stray: bool) -> str:
    """A tensor in two parts, each of which two processes hold."""
    with group(4) as rank:
        mesh = init_device_mesh("cpu", (2, 2))
        sharded = distribute_tensor(torch.arange(10.0), mesh, [Replicate(), Shard(0)])
        if stray and rank == 3:
            sharded.to_local()[2] += 1
        try:
            save_checkpoint(folder / "saved", {"sharded": sharded})
        except CheckpointError as error:
            return str(error)
    return ""


@pytest.mark.distributed
def test_copies_of_shards_count(workers: Any, tmp_path: Path) -> None:
    assert workers(4).run(saves_copies, tmp_path, False) == [""] * 4
    for said in workers(4).run(saves_copies, tmp_path, True):
        assert "saved: could not be saved on rank 0: sharded differs between processes, rank 3 from rank 1" in said


def looked(**tensors: Tensor) -> Replicas:
    replicas = Replicas(tensors)
    replicas.look()
    return replicas


def difference(*everyones: Replicas) -> tuple[int, str | None]:
    """How many processes send their fingerprints, and what is found."""
    summaries = Summaries([one.summary() for one in everyones])
    packed = [everyones[rank].packed() for rank in summaries.unlike]
    return len(packed), everyones[0].difference(summaries, packed, ["c"])


def test_the_ones_that_are_fewer_stray() -> None:
    one, two, three = (looked(b=torch.tensor(value), a=torch.ones(3)) for value in (1.0, 2.0, 3.0))
    assert difference(one, two, one, three) == (3, "b differs between processes, rank 1, 3 from rank 0")
    assert difference(one, one, one) == (0, None)
    more = looked(b=torch.tensor(1.0), a=torch.zeros(3))
    assert difference(one, one, more) == (2, "a differs between processes, rank 2 from rank 0")


def test_stages_that_share_a_tensor_send_what_they_have() -> None:
    """One of each stage: a hash of all that a process has says nothing of the shared one."""
    first, second = looked(a=torch.ones(3), tied=torch.ones(2)), looked(c=torch.ones(4), tied=torch.ones(2))
    assert difference(first, first, second, second) == (2, None)
    stray = looked(c=torch.ones(4), tied=torch.zeros(2))
    assert difference(first, first, second, stray) == (3, "tied differs between processes, rank 3 from rank 0")
    assert difference(first, first, stray, stray) == (2, "tied differs between processes, rank 2, 3 from rank 0")
    assert difference(looked(), looked(a=torch.ones(1)), looked()) == (0, None)


def test_of_large_tensors_a_quarter_is_looked_at_when_training_waits() -> None:
    large = torch.zeros(2**18)  # sixteen blocks
    changed = flipped(large, 2**16)  # in the fifth
    assert fingerprints({"a": large}) != fingerprints({"a": changed})
    assert [s for s in range(4) if fingerprints({"a": large}, s) != fingerprints({"a": changed}, s)] == [0]
    assert {share_of(f"epoch_{number}") for number in range(1, 20)} == {0, 1, 2, 3}


# What runs on a device, here on the CPU


@pytest.mark.parametrize("name", [name for name in state() if name != "empty"])
def test_every_bit_and_its_place_count_on_a_device(name: str) -> None:
    tensor = state()[name]
    number = int(of_bits(tensor))
    assert number == int(of_bits(tensor.detach().clone()))
    for at in {0, tensor.numel() // 2, tensor.numel() - 1}:
        assert int(of_bits(flipped(tensor, at))) != number
    if tensor.numel() > 1:
        flat = tensor.detach().clone().contiguous()
        ends = flat.reshape(-1).view(torch.uint8).view(-1, flat.itemsize)
        swapped = ends.clone()
        first, last = 0, next(i for i in range(len(ends) - 1, 0, -1) if not torch.equal(ends[i], ends[0]))
        swapped[first], swapped[last] = ends[last], ends[first]
        assert int(of_bits(swapped.reshape(-1).view(flat.dtype))) != number


def test_an_empty_tensor_has_a_number() -> None:
    assert int(of_bits(torch.zeros(0))) == 0
    assert fingerprints({"a": torch.zeros(0)}) == {"a": 0}
