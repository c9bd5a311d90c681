"""Checkpoints that flextrain wrote in format 1, on two processes: loaded in every layout, shown, checked, exported, resumed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from flextrain.commands import checkpoint as commands
from flextrain.core.base.errors import CheckpointError
from flextrain.core.checkpoint import Checkpoint, FlatShard, directory, export_weights, save_checkpoint
from flextrain.core.checkpoint.compare import damages

from ..runner.training import Net, Samples, make_runner, whole_state

DATA = Path(__file__).parent / "data"
CUT = {"rows": 0, "one row": 0, "columns": 1, "packed": 0, "bf16": 0, "complex": 0}


def wholes() -> dict[str, Tensor]:
    """What was saved: cut by rows, by columns, as three joined matrices, as ranges of the elements, and not at all."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"rows": (5, 3), "one row": (1, 4), "columns": (3, 6), "packed": (7, 2), "flat": (4, 3), "empty": (0, 3)}
    found = {name: torch.randn(shape, generator=generator) for name, shape in {**shapes, "scalar": ()}.items()}
    found["bf16"] = torch.randn(6, generator=generator).bfloat16()
    found["count"] = torch.arange(4)
    found["complex"] = torch.randn(3, 2, generator=generator, dtype=torch.complex64)
    return {f"model.{name}": tensor for name, tensor in found.items()}


def loaded(path: Path) -> dict[str, Tensor]:
    checkpoint = Checkpoint.open(path)
    template = {key: torch.zeros(info.shape, dtype=info.dtype) for key, info in checkpoint.tensors.items()}
    checkpoint.load(template)
    return template


def test_every_tensor_is_read(tmp_path: Path) -> None:
    path = DATA / "format_1"
    assert directory.read_manifest(path).version == 1
    found = loaded(path)
    assert found.keys() == wholes().keys()
    for key, tensor in wholes().items():
        assert torch.equal(found[key], tensor), key
    assert Checkpoint.open(path).values == {"loop": {"iter": 7}, "rng": [0, 1]}
    part = FlatShard(torch.zeros(6), (5, 3), 4)
    Checkpoint.open(path).load({"model.rows": part})
    assert torch.equal(part.to_local(), wholes()["model.rows"].flatten()[4:10])


def test_tools_read_it(tmp_path: Path) -> None:
    assert list(damages(DATA / "format_1")) == []
    shown = commands.describe(Checkpoint.open(DATA / "format_1"))
    assert shown["tensors"]["model.packed"] == {"shape": [7, 2], "dtype": "float32", "bytes": 56, "chunks": 5}
    assert {row["name"] for row in commands.list_checkpoints(DATA)} == {"format_1", "format_1_run"}
    again = save_checkpoint(tmp_path / "again", {**wholes(), "loop": {"iter": 7}})
    assert directory.read_manifest(again).version == 2
    (file,) = export_weights(DATA / "format_1_run", tmp_path / "x.safetensors")
    assert load_file(file).keys() == {
        key.removeprefix("model.") for key in loaded(DATA / "format_1_run") if "model." in key[:6]
    }


def test_damage_of_it_is_named(tmp_path: Path) -> None:
    path = Path(shutil.copytree(DATA / "format_1", tmp_path / "a"))
    shard = path / "rank-00001.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CheckpointError, match="rank-00001.safetensors: is damaged, its checksum is"):
        loaded(path)
    assert len(list(damages(path))) == 1


def test_a_run_is_resumed_from_it(tmp_path: Path) -> None:
    """One epoch on two processes under FSDP, saved by the version before; the second one goes on alone."""

    def recipe(folder: Path, **changes: Any) -> Any:
        return make_runner(
            folder,
            model=dict(type=Net, dropout=0.0),
            train_cfg=dict(by_epoch=True, max_epochs=2),
            train_dataloader=dict(batch_size=8, dataset=Samples(24), collate_fn="default_collate"),
            optim_wrapper=dict(optimizer=dict(type="AdamW", lr=0.01)),
            **changes,
        )

    resumed = recipe(tmp_path / "resumed", resume=str(DATA / "format_1_run"))
    resumed.train()
    straight = recipe(tmp_path / "straight")
    straight.train()
    found, expected = whole_state(resumed), whole_state(straight)
    tensors = {key: value for key, value in expected.items() if isinstance(value, Tensor)}
    assert len(tensors) == 16
    for key, tensor in tensors.items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-5, atol=1e-6)
