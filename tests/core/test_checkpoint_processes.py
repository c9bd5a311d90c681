"""Checkpoints of two processes: each writes and reads its own part, and if one fails all do."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from flextrain.core.base.errors import CheckpointError
from flextrain.core.checkpoint import Checkpoint, directory, save_checkpoint
from flextrain.core.checkpoint import load as loading
from flextrain.core.checkpoint import load as storage
from flextrain.core.checkpoint.manifest import MANIFEST
from flextrain.core.comm import collectives as dist
from flextrain.testing import WorkerGroup

pytestmark = pytest.mark.distributed

# Sizes that two processes cannot share evenly, one that leaves the second with nothing, and none at all.
SHAPES = {"uneven": (5, 3), "one": (1, 4), "vector": (7,), "even": (4, 2), "nothing": (0, 3)}


@contextmanager
def group() -> Iterator[tuple[int, DeviceMesh]]:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=world_size, init_method="env://", timeout_s=30)
    yield rank, init_device_mesh("cpu", (world_size,))
    dist.destroy_process_group()


def whole(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def place(tensors: dict[str, Tensor], mesh: DeviceMesh, dim: int) -> dict[str, Tensor]:
    placed = {}
    for name, tensor in tensors.items():
        placements: list[Any] = [Shard(dim) if tensor.dim() > dim else Replicate()]
        placed[name] = distribute_tensor(tensor, mesh, placements)
    return placed


def save_sharded(path: Path, dim: int) -> list[str]:
    with group() as (rank, mesh):
        state: dict[str, Any] = {f"sharded.{name}": tensor for name, tensor in place(whole(), mesh, dim).items()}
        state |= {f"bf16.{name}": tensor for name, tensor in place(whole(torch.bfloat16), mesh, dim).items()}
        state |= {f"plain.{name}": tensor for name, tensor in whole().items()}
        state["tied"] = state["plain.even"]
        state["scalar"] = torch.tensor(2.0)
        state["from"] = f"rank {rank}"
        if rank == 1:
            state["second only"] = torch.ones(2)
        save_checkpoint(path, state, per_rank={"rng": rank})
        return [file.name for file in sorted(path.iterdir())]


def check_loaded(path: Path, mesh: DeviceMesh | None, dim: int) -> None:
    checkpoint = Checkpoint.open(path)
    for prefix, dtype in (("sharded", torch.float32), ("bf16", torch.bfloat16), ("plain", torch.float32)):
        template = {name: torch.full_like(tensor, 9.0) for name, tensor in whole(dtype).items()}
        if mesh is not None:
            template = place(template, mesh, dim)
        checkpoint.load({f"{prefix}.{name}": tensor for name, tensor in template.items()})
        for name, tensor in whole(dtype).items():
            found = template[name]
            found = found.full_tensor() if isinstance(found, DTensor) else found
            assert torch.equal(found, tensor), f"{prefix}.{name}"
    others = {"scalar": torch.tensor(0.0), "tied": torch.zeros(4, 2), "second only": torch.zeros(2)}
    checkpoint.load(others)
    assert others["scalar"].item() == 2.0
    assert torch.equal(others["tied"], whole()["even"])
    assert torch.equal(others["second only"], torch.ones(2))
    assert checkpoint.values == {"from": "rank 0", "rng": [0, 1]}


def load_sharded(path: Path, dim: int) -> None:
    with group() as (_, mesh):
        check_loaded(path, mesh, dim)


@pytest.mark.parametrize("dim", [0, 1])
def test_sharded_tensors_come_back_in_any_layout(workers2: WorkerGroup, tmp_path: Path, dim: int) -> None:
    path = tmp_path / "a"
    files = workers2.run(save_sharded, path, dim)
    assert files[0] == ["manifest.json", "rank-00000.safetensors", "rank-00001.safetensors", "values.json"]
    workers2.run(load_sharded, path, dim)
    workers2.run(load_sharded, path, 1 - dim)
    check_loaded(path, None, dim)


def test_a_part_does_not_pass_for_the_whole(workers2: WorkerGroup, tmp_path: Path) -> None:
    workers2.run(save_sharded, tmp_path / "a", 0)
    with safe_open(tmp_path / "a" / "rank-00001.safetensors", framework="pt") as file:
        names = set(file.keys())
        assert {"sharded.uneven@3,0", "sharded.vector@4", "sharded.even@2,0"} <= names
        assert not names & {"sharded.uneven", "sharded.vector", "sharded.even"}
        assert torch.equal(file.get_tensor("sharded.uneven@3,0"), whole()["uneven"][3:])


def attempt(path: Path, failing: int, kind: str) -> str:
    """Save with something on one rank that cannot be saved; what this rank got to hear."""
    with group() as (rank, _):
        state: dict[str, Any] = {"x": torch.tensor(2.0)}
        per_rank: dict[str, Any] = {}
        if rank == failing and kind == "tensor":
            state["y"] = torch.ones(1, dtype=torch.float8_e4m3fnuz)
        if rank == failing and kind == "value":
            per_rank["rng"] = {1, 2}
        if rank == failing and kind == "cannot be sent":
            per_rank["rng"] = lambda: 0
        try:
            save_checkpoint(path, state, per_rank=per_rank)
        except CheckpointError as error:
            return str(error)
        return "nothing"


@pytest.mark.parametrize(
    "failing, kind, reason",
    [(0, "tensor", "float8_e4m3fnuz"), (1, "value", "set"), (0, "value", "set"), (1, "cannot be sent", "function")],
)
def test_when_one_process_cannot_save_all_raise(
    workers2: WorkerGroup, tmp_path: Path, failing: int, kind: str, reason: str
) -> None:
    path = save_checkpoint(tmp_path / "a", {"x": torch.tensor(1.0)})
    for heard in workers2.run(attempt, path, failing, kind):
        assert f"could not be saved on rank {failing}: " in heard
        assert reason in heard
    x = torch.zeros(())
    Checkpoint.open(path).load({"x": x})
    assert x.item() == 1.0  # the one that was there still is


def read_own_part(path: Path) -> str:
    with group() as (_, mesh):
        template = place({name: torch.zeros_like(tensor) for name, tensor in whole().items()}, mesh, 0)
        try:
            Checkpoint.open(path).load({f"sharded.{name}": tensor for name, tensor in template.items()})
        except CheckpointError as error:
            return str(error)
        return "nothing"


def test_when_one_process_cannot_read_all_raise(workers2: WorkerGroup, tmp_path: Path) -> None:
    path = tmp_path / "a"
    workers2.run(save_sharded, path, 0)
    shard = path / "rank-00001.safetensors"
    shard.write_bytes(bytes(shard.stat().st_size))
    for heard in workers2.run(read_own_part, path):
        assert f"{shard}: is damaged, its checksum is" in heard
    manifest = json.loads((path / MANIFEST).read_text())
    del manifest["xxh3"]
    manifest["files"][shard.name] = directory.file_entry(shard).model_dump()
    directory.seal(path, json.dumps(manifest).encode())
    for heard in workers2.run(read_own_part, path):
        assert f"could not be read on rank 1: {shard}: is damaged" in heard


def not_shared(path: Path) -> str:
    """Save to a place that each process sees for itself alone."""
    with group() as (rank, _):
        try:
            save_checkpoint(path / f"disk of {rank}" / "a", {f"x{rank}": torch.ones(1)})
        except CheckpointError as error:
            return str(error)
        return "nothing"


def test_storage_that_is_not_shared_is_told(workers2: WorkerGroup, tmp_path: Path) -> None:
    for heard in workers2.run(not_shared, tmp_path):
        assert "on rank 1: " in heard
        assert "rank 0's directory is not visible here, use storage that all processes share" in heard


def opened_together(path: Path) -> dict[str, Any]:
    """What this process reads of a checkpoint that both load in the layout in which it was saved."""
    with group() as (_, mesh), pytest.MonkeyPatch.context() as patch:
        read: dict[str, Any] = {"index": 0, "checked": [], "opened": []}
        text, check, source = directory.read_manifest_text, directory.check_file, storage.checkpoint_source

        def counted(folder: Path) -> bytes:
            read["index"] += 1
            return text(folder)

        def checked(file: Path, entry: Any) -> None:
            read["checked"].append(file.name)
            check(file, entry)

        def opening(folder: Path) -> Any:
            opens = source(folder)
            return lambda name: read["opened"].append(name) or opens(name)

        patch.setattr(directory, "read_manifest_text", counted)
        patch.setattr(directory, "check_file", checked)
        patch.setattr(loading, "checkpoint_source", opening)
        try:
            checkpoint = Checkpoint.open_together(path)
        except CheckpointError as error:
            return {**read, "error": str(error)}
        template = place({name: torch.zeros_like(tensor) for name, tensor in whole().items()}, mesh, 0)
        checkpoint.load({f"sharded.{name}": tensor for name, tensor in template.items()})
        for name, tensor in whole().items():
            assert torch.equal(template[name].full_tensor(), tensor)  # type: ignore[attr-defined]
        assert checkpoint.values == {"from": "rank 0", "rng": [0, 1]}
        return read


def test_the_index_is_read_once_files_are_checked_once_and_no_process_reads_the_others_shards(
    workers2: WorkerGroup, tmp_path: Path
) -> None:
    path = tmp_path / "a"
    workers2.run(save_sharded, path, 0)
    reads = workers2.run(opened_together, path)
    shards = ["rank-00000.safetensors", "rank-00001.safetensors"]
    assert [read["index"] for read in reads] == [1, 0]
    assert sorted(name for read in reads for name in read["checked"]) == [*shards, "values.json"]
    assert [read["opened"] for read in reads] == [shards[:1], shards[1:]]
    (path / "values.json").write_text("x" * (path / "values.json").stat().st_size)
    errors = [read["error"] for read in workers2.run(opened_together, path)]
    assert len(set(errors)) == 1
    assert "values.json: is damaged, its checksum is" in errors[0]
