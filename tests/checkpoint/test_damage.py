"""Every byte counts: a checkpoint with one bit changed, or cut short anywhere, is refused, and the error names the file."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from flextrain.core.base.errors import CheckpointError
from flextrain.core.checkpoint import Checkpoint, export_weights, open_weights, save_checkpoint
from flextrain.core.comm import collectives as dist
from flextrain.testing import WorkerGroup

pytestmark = pytest.mark.distributed

FLIPS, CUTS = 200, 50
KEYS = {"manifest.json", "values.json", "rank-00000.safetensors", "rank-00001.safetensors"}

Damage = Callable[[bytes, random.Random], bytes]


def write(path: Path) -> None:
    """In two workers: a checkpoint of three dtypes, sharded and whole tensors, one without elements, and plain values."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=world_size, init_method="env://", timeout_s=30)
    mesh, generator = init_device_mesh("cpu", (world_size,)), torch.Generator().manual_seed(0)
    weight = torch.randn(9, 5, generator=generator)
    state = {
        "model.weight": distribute_tensor(weight, mesh, [Shard(0)]),
        "optim.state.weight.exp_avg": distribute_tensor(weight.bfloat16(), mesh, [Shard(1)]),
        "model.count": torch.tensor(3),
        "model.empty": torch.zeros(0, 2),
        "optim.group.weight.lr": 0.1,
        "loop": {"epoch": 1, "iter": 7, "done": False},
    }
    save_checkpoint(path, state, per_rank={"rng": list(range(20))})
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, workers2: WorkerGroup) -> Path:
    path = tmp_path_factory.mktemp("damage") / "epoch_1"
    workers2.run(write, path)
    assert {file.name for file in path.iterdir()} == KEYS
    return path


def flip(content: bytes, chance: random.Random) -> bytes:
    """One bit is another."""
    place, bit = chance.randrange(len(content)), chance.randrange(8)
    return content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :]


def cut(content: bytes, chance: random.Random) -> bytes:
    """The end is missing; at most everything."""
    return content[: chance.randrange(len(content))]


def overwrite(content: bytes, chance: random.Random) -> bytes:
    """As long as before, and zeros from somewhere on: what a power cut leaves on some file systems."""
    place = chance.randrange(len(content))
    return content[:place] + bytes(len(content) - place)


def load(path: Path) -> None:
    opened = Checkpoint.open(path)
    opened.load({key: torch.empty(info.shape, dtype=info.dtype) for key, info in opened.tensors.items()})


def load_weights(path: Path) -> None:
    opened = open_weights(path)
    opened.load({key: torch.empty(info.shape, dtype=info.dtype) for key, info in opened.tensors.items()})


def export(path: Path) -> None:
    export_weights(path, path.parent / "exported.safetensors", replace=True)


def survivors(path: Path, read: Callable[[Path], None], damage: Damage, count: int) -> list[str]:
    """In a worker: what happened otherwise than a CheckpointError that names the file, for each of ``count`` damages.

    Small files have as many as large ones. A worker, since a mapped file that is cut short can end the process.
    """
    read(path)  # it is whole
    chance, found = random.Random(0), []
    for _ in range(count):
        file = path / chance.choice(sorted(KEYS))
        content = file.read_bytes()
        damaged = damage(content, chance)
        if damaged == content:
            continue
        file.write_bytes(damaged)
        try:
            read(path)
            found.append(f"{file.name}: was loaded")
        except CheckpointError as error:
            if str(file) not in str(error):
                found.append(f"{file.name}: {error}")
        except Exception as error:
            found.append(f"{file.name}: {error!r}")
        finally:
            file.write_bytes(content)
    read(path)
    return found


@pytest.mark.parametrize("damage, count", [(flip, FLIPS), (cut, CUTS), (overwrite, CUTS)])
@pytest.mark.parametrize("read", [load, load_weights, export])
def test_every_byte_counts(
    tmp_path: Path,
    checkpoint: Path,
    workers: Callable[[int], WorkerGroup],
    read: Callable[[Path], None],
    damage: Damage,
    count: int,
) -> None:
    shutil.copytree(checkpoint, tmp_path / "epoch_1")
    assert workers(1).run(survivors, tmp_path / "epoch_1", read, damage, count) == [[]]
