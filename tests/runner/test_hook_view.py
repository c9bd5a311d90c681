"""What hooks see of a checkpoint before it is written, and what becomes of their changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flextrain import CheckpointError, Hook
from flextrain.core.checkpoint import Checkpoint, FlatShard, find_latest
from flextrain.testing import WorkerGroup

from .training import Net, SaveEvery, make_runner

pytestmark = pytest.mark.usefixtures("quick")

Change = Callable[[Any, dict[str, Any]], None]


class Changes(Hook):
    """Does something with each checkpoint, and keeps what a resumed one holds."""

    def __init__(self, change: Change | None = None) -> None:
        self.change, self.loaded = change, {}

    def before_save_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        if self.change is not None:
            self.change(runner, checkpoint)

    def after_load_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        self.loaded = checkpoint


def saved(folder: Path, change: Change, **changes: Any) -> Path:
    schedule = dict(type="LinearLR", by_epoch=False, end=4)
    hooks = [Changes(change), SaveEvery({3})]
    settings: dict[str, Any] = dict(train_cfg=dict(by_epoch=False, max_iters=3), param_scheduler=schedule)
    make_runner(folder, **{**settings, **changes}, custom_hooks=hooks).train()
    return folder / "iter_3"


def test_it_has_what_mmengines_has(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    def look(runner: Any, checkpoint: dict[str, Any]) -> None:
        seen.update(checkpoint)
        weights = dict(runner.strategy.module.named_parameters())
        assert checkpoint["state_dict"].keys() == weights.keys()
        assert all(tensor.data_ptr() == weights[name].data_ptr() for name, tensor in checkpoint["state_dict"].items())

    saved(tmp_path, look)
    assert seen.keys() == {"meta", "state_dict", "optimizer", "message_hub", "param_schedulers"}
    assert (seen["meta"]["epoch"], seen["meta"]["iter"], seen["meta"]["seed"]) == (0, 3, 1)
    assert "train/loss" in repr(seen["message_hub"])
    assert [len(group) for group in seen["param_schedulers"].values()] == [1]
    assert isinstance(seen["optimizer"]["state.net.0.weight.momentum_buffer"], Tensor)


def test_changes_are_written_and_come_back(tmp_path: Path) -> None:
    def change(runner: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["meta"]["classes"] = ["a", "b"]
        checkpoint["meta"] |= {"version": 3}
        checkpoint["mine"] = {"table": torch.arange(3)}
        checkpoint["state_dict"]["net.0.bias"] = torch.full((8,), 7.0)

    path = saved(tmp_path / "first", change)
    hook = Changes()
    live = make_runner(
        tmp_path / "rest", resume=str(path), custom_hooks=[hook], train_cfg=dict(max_epochs=1), **NO_RATE
    )
    live.train()
    assert (hook.loaded["meta"]["classes"], hook.loaded["meta"]["version"]) == (["a", "b"], 3)
    assert hook.loaded["mine"]["table"].tolist() == [0, 1, 2]
    assert find_latest(tmp_path / "first") == path
    loaded = make_runner(tmp_path / "weights")
    loaded.load_checkpoint(path)
    assert (loaded.strategy.module.net[0].bias == 7.0).all()  # type: ignore[union-attr, index]


NO_RATE: dict[str, Any] = dict(param_scheduler=dict(type="LinearLR", by_epoch=False, end=4))


@pytest.mark.parametrize(
    ("key", "advice"),
    [
        ("message_hub", r"it has no message_hub; resume=dict\(logs=False\)"),
        ("param_schedulers", r"it has no scheduler; resume=dict\(param_scheduler=False\)"),
        ("optimizer", r"it has no optim.wrapper; resume=dict\(optimizer=False\)"),
    ],
)
def test_what_is_taken_out_is_not_there(tmp_path: Path, key: str, advice: str) -> None:
    path = saved(tmp_path / "first", lambda runner, checkpoint: checkpoint.pop(key))
    with pytest.raises(CheckpointError, match=advice):
        make_runner(tmp_path / "rest", resume=str(path), **NO_RATE).train()
    assert find_latest(tmp_path / "first") == (None if key == "optimizer" else path), "latest can be resumed"


def take_out(runner: Any, checkpoint: dict[str, Any]) -> None:
    del checkpoint["state_dict"]["net.0.bias"]


def replace(name: str, value: Any) -> Change:
    def change(runner: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"][name] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (take_out, r"removed net.0.bias from .*, which makes resuming impossible; save_optimizer=False"),
        (lambda runner, checkpoint: checkpoint.pop("state_dict"), r'removed checkpoint\["state_dict"\], but'),
        (replace("extra", torch.ones(1)), r'added extra to checkpoint\["state_dict"\], give what is to be saved a key'),
        (
            replace("net.0.bias", torch.ones(9)),
            r"put Tensor in the place of .*\[\"net.0.bias\"\], a Tensor of shape \(8,\)",
        ),
        (replace("net.0.bias", 3), r"put int in the place of"),
        (lambda runner, checkpoint: checkpoint["optimizer"].popitem(), r'changed checkpoint\["optimizer"\]'),
        (lambda runner, checkpoint: checkpoint["optimizer"].update(a=1), r'changed checkpoint\["optimizer"\]'),
    ],
)
def test_what_cannot_be_written_is_refused(tmp_path: Path, change: Change, message: str) -> None:
    with pytest.raises(CheckpointError, match=f"^before_save_checkpoint: a hook has {message}"):
        saved(tmp_path, change)


def test_names_may_be_taken_out_of_weights_alone(tmp_path: Path) -> None:
    runner = make_runner(tmp_path, custom_hooks=[Changes(take_out)], train_cfg=dict(max_epochs=1))
    runner.train()
    runner.save_checkpoint(tmp_path, "weights", save_optimizer=False)
    names = {key for key in Checkpoint.open(tmp_path / "weights").entries if key.startswith("model.")}
    assert names == {f"model.{name}" for name, _ in Net().named_parameters()} - {"model.net.0.bias"}


def sharded(folder: str, strategy: dict[str, Any]) -> tuple[str, str]:
    """The kind of a weight, and what is said to a plain tensor in its place."""
    kinds: list[str] = []

    def change(runner: Any, checkpoint: dict[str, Any]) -> None:
        kinds.append(type(checkpoint["state_dict"]["net.0.weight"]).__name__)
        checkpoint["state_dict"]["net.0.weight"] = torch.zeros(8, 6)

    runner = make_runner(
        folder, strategy=strategy, custom_hooks=[Changes(change), SaveEvery({2})],
        optim_wrapper=dict(optimizer=dict(type="Adam")),
    )  # fmt: skip
    with pytest.raises(CheckpointError) as caught:
        runner.train()
    runner.strategy.leave()
    return kinds[0], str(caught.value)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        (dict(type="FSDPStrategy"), "DTensor"),
        pytest.param(
            dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=2)),
            FlatShard.__name__,
            marks=pytest.mark.deepspeed,
        ),
    ],
    ids=["fsdp", "zero2"],
)
def test_sharded_weights_are_seen_as_they_are(
    tmp_path: Path, workers2: WorkerGroup, strategy: dict[str, Any], kind: str
) -> None:
    for found, message in workers2.run(sharded, str(tmp_path), strategy):
        assert found == kind
        assert (
            f'put Tensor in the place of checkpoint["state_dict"]["net.0.weight"], a {kind} of shape (8, 6)' in message
        )
