"""What a run leaves in its work directory, and which of it a resumed run begins with."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from flextrain import CheckpointError, FlexibleRunner
from flextrain.core.base.errors import ConfigError
from flextrain.core.checkpoint import Checkpoint, directory, find_latest, is_checkpoint
from flextrain.runner.hooks import Hook
from flextrain.testing import WorkerGroup

from ..runner.training import SGD, Net, Samples, Stop, make_runner, validation

ADAMW = dict(type="AdamW", lr=0.01)
EPOCHS = dict(checkpoint=dict(interval=1))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Parts(nn.Module):
    """Of everything that has a name: a tied weight, a frozen layer, a buffer that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(6, 2).requires_grad_(False)
        self.register_buffer("scale", torch.ones(6))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, index: Any, x: Tensor, y: Tensor, mode: str = "loss") -> Any:
        logits = self.frozen(self.second(self.norm(self.first(x) * self.scale)))
        if mode == "loss":
            return {"loss": nn.functional.cross_entropy(logits.float(), y)}
        return {"index": index, "logits": logits, "y": y}


TRAINED = {"first.weight": (6, 6), "first.bias": (6,), "second.bias": (6,), "norm.weight": (6,), "norm.bias": (6,)}
FROZEN = {"frozen.weight": (2, 6), "frozen.bias": (2,)}


def train(folder: Path | str, *hooks: Hook, **changes: Any) -> FlexibleRunner:
    """Three epochs with a checkpoint after each."""
    common = dict(model=Parts, optim_wrapper=dict(optimizer=ADAMW), default_hooks=EPOCHS)
    own = changes.pop("custom_hooks", ())
    runner = make_runner(folder, **{**common, **changes, "custom_hooks": [*own, *hooks]})
    runner.train()
    return runner


# What is in it


def tensors_of_adamw() -> dict[str, tuple[int, ...]]:
    found = {f"model.{name}": shape for name, shape in {**TRAINED, **FROZEN, "scale": (6,)}.items()}
    for name, shape in TRAINED.items():
        found |= {f"optim.state.{name}.{key}": shape for key in ("exp_avg", "exp_avg_sq")}
        found[f"optim.state.{name}.step"] = ()
    return found


def check_contents(path: Path, processes: int) -> None:
    checkpoint = Checkpoint.open(path)
    assert {key: info.shape for key, info in checkpoint.tensors.items()} == tensors_of_adamw()
    assert {info.dtype for info in checkpoint.tensors.values()} == {torch.float32}
    values = checkpoint.values
    for name in TRAINED:
        assert values[f"optim.group.{name}.lr"] == 0.01
        assert values[f"optim.group.{name}.optimizer"] == "AdamW"
    assert not [key for key in values if key.startswith("optim.group.frozen")]  # their group has trained ones
    plain = {key for key in values if not key.startswith(("optim.group.", "hook."))}
    assert plain == {
        "scheduler", "schedules", "loop", "data", "processes", "aliases", "message_hub", "own_losses", "meta", "hooks", "rng",
        "loader", "late_buffers", "frozen",
        "optim.wrapper",
    }  # fmt: skip
    assert len(values["rng"]) == len(values["own_losses"]) == values["processes"] == processes
    assert values["loop"] == {"epoch": 2, "iter": 14, "inner": 0, "left": 7, "validated": 0}
    assert values["meta"]["seed"] == 1
    assert (values["meta"]["epoch"], values["meta"]["iter"]) == (2, 14)
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["written_by"]["world_size"] == processes
    assert {file.name for file in path.iterdir()} == {"manifest.json", *manifest["files"]}
    assert manifest["files"] == {name: directory.file_entry(path / name).model_dump() for name in manifest["files"]}


def test_what_is_in_a_checkpoint(tmp_path: Path) -> None:
    """Names are those of the user's model, a tied weight is there once, and every reader of safetensors can read it."""
    runner = train(tmp_path)
    check_contents(tmp_path / "epoch_2", 1)
    with safe_open(tmp_path / "epoch_3" / "rank-00000.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(tensors_of_adamw())
        for name, tensor in runner.strategy.module.named_parameters():
            assert torch.equal(file.get_tensor(f"model.{name}"), tensor)
    others = [path.name for path in tmp_path.iterdir() if path.name != runner.timestamp]
    assert sorted(others) == ["epoch_1", "epoch_2", "epoch_3", "events.jsonl", "latest"]


def on_two(folder: str) -> None:
    data = dict(batch_size=2, dataset=Samples(26), collate_fn="default_collate")
    train(folder, train_dataloader=data).strategy.leave()


@pytest.mark.distributed
def test_what_two_processes_write(tmp_path: Path, workers2: WorkerGroup) -> None:
    """The same keys, each tensor once whoever writes it, and no wrapper's prefix."""
    workers2.run(on_two, str(tmp_path))
    check_contents(tmp_path / "epoch_2", 2)
    assert (tmp_path / "latest").read_text() == "epoch_3"


@pytest.mark.parametrize(
    "changes",
    [
        dict(compile=dict(backend="eager")),
        dict(strategy=dict(type="SingleDeviceStrategy", activation_checkpointing=dict(classes=["Linear"]))),
        dict(optim_wrapper=dict(type="AmpOptimWrapper", optimizer=ADAMW, dtype="float16", accumulative_counts=2)),
        dict(optim_wrapper=dict(optimizer=ADAMW, paramwise_cfg=dict(custom_keys=dict(norm=dict(lr_mult=0.5))))),
    ],
    ids=["compile", "activation-checkpointing", "autocast", "groups"],
)
def test_names_and_types_do_not_depend_on_how_it_was_trained(tmp_path: Path, changes: dict[str, Any]) -> None:
    train(tmp_path, train_cfg=dict(max_epochs=1), **changes)
    tensors = Checkpoint.open(tmp_path / "epoch_1").tensors
    assert {key: info.shape for key, info in tensors.items()} == tensors_of_adamw()
    masters = [info.dtype for key, info in tensors.items() if "frozen" not in key and "scale" not in key]
    assert set(masters) == {torch.float32}


def test_only_what_the_optimizer_has_created(tmp_path: Path) -> None:
    for number, (optimizer, names) in enumerate([(dict(type="SGD", lr=0.1), set()), (SGD, {"momentum_buffer"})]):
        folder = tmp_path / str(number)
        train(folder, optim_wrapper=dict(optimizer=optimizer), train_cfg=dict(max_epochs=1))
        tensors = Checkpoint.open(folder / "epoch_1").tensors
        assert {key.rpartition(".")[2] for key in tensors if key.startswith("optim.")} == names


def test_states_of_hooks(tmp_path: Path) -> None:
    hooks = [dict(type="EMAHook"), dict(type="EarlyStoppingHook", monitor="accuracy", rule="greater")]
    runner = train(tmp_path, custom_hooks=hooks, **validation())
    checkpoint = Checkpoint.open(tmp_path / "epoch_2")
    averages = {key for key in checkpoint.tensors if key.startswith("hook.")}
    assert averages == {f"hook.EMAHook/averaged.{name}" for name in (*TRAINED, *FROZEN)}
    assert checkpoint.values["hook.EMAHook/updates"] == 14
    assert checkpoint.values["hook.CheckpointHook/kept"] == [1, 2]
    assert checkpoint.values["hook.EarlyStoppingHook/wait_count"] >= 0  # that of the first validation
    assert runner.iter == 21


def test_save_optimizer_and_save_param_scheduler(tmp_path: Path) -> None:
    hooks = dict(checkpoint=dict(interval=1, save_optimizer=False, save_param_scheduler=False))
    train(tmp_path, default_hooks=hooks, train_cfg=dict(max_epochs=1))
    checkpoint = Checkpoint.open(tmp_path / "epoch_1")
    keys = {*checkpoint.tensors, *checkpoint.values}
    assert not [key for key in keys if key.startswith(("optim.", "scheduler"))]
    assert not (tmp_path / "latest").exists()


# Which one is resumed


def test_latest_moves_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever happens before it moves, the one before is what it names, and that is complete."""
    becoming = directory.becoming_latest

    @contextmanager
    def fails(path: Path) -> Iterator[None]:
        with becoming(path):
            yield
            assert is_checkpoint(path), "named before it was complete"
            if path.name == "epoch_2":
                raise Stop

    monkeypatch.setattr(directory, "becoming_latest", fails)
    with pytest.raises(CheckpointError, match="epoch_2: could not be saved on rank 0: Stop"):
        train(tmp_path)
    assert is_checkpoint(tmp_path / "epoch_2")
    latest = find_latest(tmp_path)
    assert latest is not None
    assert latest.name == "epoch_1"


def test_a_disk_without_room_for_latest_fails_the_whole_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A complete checkpoint beside an error would be counted by nobody."""
    write = directory.write_file

    def fails(path: Path, *args: Any) -> Any:
        if path.name.startswith(".latest") and (tmp_path / "latest").exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, *args)

    monkeypatch.setattr(directory, "write_file", fails)
    with pytest.raises(CheckpointError, match=r"epoch_2: could not be saved on rank 0: .*No space left"):
        train(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*epoch*")) == ["epoch_1"]


def test_the_best_is_not_the_latest(tmp_path: Path) -> None:
    hooks = dict(checkpoint=dict(interval=1, save_best="accuracy", rule="greater"))
    train(tmp_path, default_hooks=hooks, **validation())
    (best,) = tmp_path.glob("best_accuracy_epoch_*")
    assert is_checkpoint(best)
    assert (tmp_path / "latest").read_text() == "epoch_3"
    assert not [key for key in Checkpoint.open(best).saved if key.startswith("optim.")]
    with pytest.raises(CheckpointError, match="cannot be resumed, it has no optim.wrapper; resume=dict"):
        train(tmp_path / "resumed", resume=str(best))
    train(tmp_path / "loaded", load_from=str(best))


def test_a_path_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'^resume: ".*/epoch_9" does not exist$'):
        train(tmp_path, resume=str(tmp_path / "epoch_9"))


def test_out_dir(tmp_path: Path) -> None:
    hooks = dict(checkpoint=dict(interval=1, out_dir=str(tmp_path / "elsewhere")))
    runner = make_runner(tmp_path / "run", model=Net, default_hooks=hooks, train_cfg=dict(max_epochs=1))
    runner.train()
    assert find_latest(tmp_path / "elsewhere" / "run") == tmp_path / "elsewhere" / "run" / "epoch_1"
