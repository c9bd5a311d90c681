"""What a run leaves in its work directory, and which of it a resumed run begins with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from flextrain import CheckpointError, FlexibleRunner
from flextrain.core.checkpoint import Checkpoint, find_latest, is_checkpoint
from flextrain.runner.hooks import Hook
from flextrain.testing import WorkerGroup

from ..runner.training import SGD, Net, Samples, SaveEvery, Stop, StopAt, Watch, make_runner, validation

ADAMW = dict(type="AdamW", lr=0.01)
SAVES = dict(checkpoint=dict(interval=1))


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Parts(nn.Module):
    """Of everything that has a name: a tied weight, a frozen layer, a buffer that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(6, 2).requires_grad_(False)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, index: Any, x: Tensor, y: Tensor, mode: str = "loss") -> Any:
        logits = self.frozen(self.second(self.norm(self.first(x))))
        if mode == "loss":
            return {"loss": nn.functional.cross_entropy(logits, y)}
        return {"index": index, "logits": logits, "y": y}


TENSORS = {"first.weight": (6, 6), "first.bias": (6,), "second.bias": (6,), "norm.weight": (6,), "norm.bias": (6,)}
REST = {
    "frozen.weight": (2, 6),
    "frozen.bias": (2,),
    "norm.running_mean": (6,),
    "norm.running_var": (6,),
    "norm.num_batches_tracked": (),
}


def train(folder: Path | str, *hooks: Hook, **changes: Any) -> FlexibleRunner:
    runner = make_runner(
        folder,
        **{
            "model": Parts,
            "optim_wrapper": dict(optimizer=ADAMW),
            "default_hooks": SAVES,
            **changes,
            "custom_hooks": [*changes.get("custom_hooks", ()), *hooks],
        },
    )
    runner.train()
    runner.strategy.teardown()
    return runner


def expected_tensors() -> dict[str, tuple[int, ...]]:
    found = {f"model.{name}": shape for name, shape in {**TENSORS, **REST}.items()}
    for name, shape in TENSORS.items():
        found |= {f"optim.state.{name}.{key}": shape for key in ("exp_avg", "exp_avg_sq")}
        found[f"optim.state.{name}.step"] = ()
    return found


def check_contents(path: Path, world_size: int) -> None:
    checkpoint = Checkpoint.open(path)
    assert {key: info.shape for key, info in checkpoint.tensors.items()} == expected_tensors()
    values = checkpoint.values
    groups = {f"optim.group.{name}.{key}" for name in (*TENSORS, "frozen.weight", "frozen.bias") for key in ("lr", "optimizer")}
    assert groups <= values.keys()
    assert values["optim.group.first.weight.lr"] == 0.01
    assert values["optim.group.first.weight.optimizer"] == "AdamW"
    plain = {key for key in values if not key.startswith(("optim.", "hook."))}
    assert plain == {"scheduler", "loop", "data", "message_hub", "meta", "rng"}
    assert len(values["rng"]) == world_size
    assert values["loop"] == {"epoch": 2, "iter": values["loop"]["iter"], "inner": 0, "validated": 0}
    assert values["data"]["processes"] == world_size
    assert values["meta"]["seed"] == 1
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["written_by"]["world_size"] == world_size
    assert {file.name for file in path.iterdir()} == {"manifest.json", *manifest["files"]}
    assert manifest["files"] == {name: (path / name).stat().st_size for name in manifest["files"]}


def test_what_is_in_a_checkpoint(tmp_path: Path) -> None:
    """Names are those of the user's model; a tied weight is there once; nothing needs pickle to be read."""
    runner = train(tmp_path)
    check_contents(tmp_path / "epoch_2", 1)
    with safe_open(tmp_path / "epoch_3" / "rank-00000.safetensors", framework="pt") as file:
        assert torch.equal(file.get_tensor("model.first.weight"), runner.strategy._module_weight if False else _first(runner))
    assert sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith("2")) == [
        "epoch_1", "epoch_2", "epoch_3", "latest",
    ]  # fmt: skip


def _first(runner: FlexibleRunner) -> Tensor:
    return WEIGHTS[-1]


WEIGHTS: list[Tensor] = []


class KeepWeights(Hook):
    def after_train_iter(
        self, runner: FlexibleRunner, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        WEIGHTS.append(runner.strategy.module.first.weight.detach().clone())


def on_two(folder: str, **changes: Any) -> None:
    data = dict(batch_size=2, dataset=Samples(26), collate_fn="default_collate")
    train(folder, train_dataloader=data, **changes)


@pytest.mark.distributed
def test_what_two_processes_write(tmp_path: Path, workers2: WorkerGroup) -> None:
    """The same keys, each tensor once, whoever writes it; no wrapper's prefix."""
    workers2.run(on_two, str(tmp_path))
    check_contents(tmp_path / "epoch_2", 2)
    assert (tmp_path / "latest").read_text() == "epoch_3"
