"""Checkpoints without frozen parameters: what they lack, and who brings it when a run goes on."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from flextrain import CheckpointError, ConfigError, FSDPStrategy, Hook, StrategyError
from flextrain.core.checkpoint import Checkpoint, FlatShard
from flextrain.testing import WorkerGroup

from .training import Net, Samples, make_runner, whole_state

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("quick")]

STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": dict(type="DDPStrategy"),
    "fsdp": dict(type="FSDPStrategy", wrap=["Linear"]),
    "zero1": dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=1)),
    "zero3": dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=3)),
}
FROZEN = {"net.0.weight", "net.0.bias"}
ALL = [pytest.param(name, marks=pytest.mark.deepspeed if "zero" in name else ()) for name in STRATEGIES]


class HalfFrozen(Net):
    def __init__(self, frozen: set[str] = FROZEN) -> None:
        super().__init__(dropout=0.0)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name not in frozen)


def trained(
    folder: Path, strategy: str, epochs: int, model: Any = HalfFrozen, seed: int = 1, **changes: Any
) -> dict[str, Any]:
    """Everything at the end, whole; the last epoch's checkpoint is in the folder."""
    exclude = changes.pop("exclude", True)
    runner = make_runner(
        folder,
        model=model,
        strategy={**STRATEGIES[strategy], "exclude_frozen_parameters": exclude},
        train_dataloader=dict(batch_size=2, dataset=Samples(16), collate_fn="default_collate"),
        optim_wrapper=dict(optimizer=dict(type="AdamW", lr=0.02)),
        train_cfg=dict(max_epochs=epochs),
        randomness=dict(seed=seed),
        default_hooks=dict(checkpoint=dict(type="CheckpointHook", interval=1, overwrite=True)),
        **changes,
    )
    try:
        runner.train()
        state = whole_state(runner)
        names = {name for name, _ in runner.strategy.module.named_parameters()}
        live = {f"model.{name}": t.detach() for name, t in runner.strategy.model_state().items() if name in names}
        state = {**state, **live}
        return {k: v.full_tensor() if isinstance(v, (DTensor, FlatShard)) else v for k, v in state.items()}
    finally:
        runner.strategy.teardown()


def resumed(folder: Path, strategy: str, **changes: Any) -> dict[str, Any] | str:
    """As ``trained``, or the message of what was raised."""
    try:
        return trained(folder / "again", strategy, 2, resume=str(folder / "first" / "epoch_1"), **changes)
    except CheckpointError as error:
        return str(error)


def parameters(checkpoint: Path) -> set[str]:
    return {key.removeprefix("model.") for key in Checkpoint.open(checkpoint).entries if key.startswith("model.")}


@pytest.mark.parametrize("strategy", ALL)
def test_a_run_goes_on_without_them(tmp_path: Path, workers2: WorkerGroup, strategy: str) -> None:
    whole = workers2.run(trained, tmp_path / "whole", strategy, 2)
    workers2.run(trained, tmp_path / "first", strategy, 1)
    assert parameters(tmp_path / "first" / "epoch_1") == {"net.3.weight", "net.3.bias"}
    for found, expected in zip(workers2.run(resumed, tmp_path, strategy), whole, strict=True):
        assert isinstance(found, dict)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[k], v) for k, v in expected.items() if isinstance(v, Tensor))


def test_the_model_brings_them_and_a_checkpoint_that_has_them_counts(tmp_path: Path, workers2: WorkerGroup) -> None:
    (first, _) = workers2.run(trained, tmp_path / "first", "fsdp", 1)
    (other, _) = workers2.run(resumed, tmp_path, "fsdp", seed=5)
    assert isinstance(other, dict)
    assert not torch.equal(other["model.net.0.weight"], first["model.net.0.weight"])
    (whole, _) = workers2.run(trained, tmp_path / "first", "fsdp", 1, exclude=False)
    (found, _) = workers2.run(resumed, tmp_path, "fsdp", seed=5)
    assert isinstance(found, dict)
    assert torch.equal(found["model.net.0.weight"], whole["model.net.0.weight"])


def test_whatever_else_is_missing_is_an_error(tmp_path: Path, workers2: WorkerGroup) -> None:
    workers2.run(trained, tmp_path / "first", "ddp", 1, partial(HalfFrozen, FROZEN | {"net.3.weight"}))
    place = f"{tmp_path / 'first' / 'epoch_1'}: does not fit the model: missing"
    assert workers2.run(resumed, tmp_path, "ddp") == [f"{place} net.3.weight"] * 2
    workers2.run(trained, tmp_path / "first", "ddp", 1)
    assert workers2.run(resumed, tmp_path, "ddp", exclude=False) == [f"{place} net.0.weight, net.0.bias"] * 2


class Change(Hook):
    """Freezes or thaws a layer before the second epoch."""

    def __init__(self, layer: int, trainable: bool) -> None:
        self.layer, self.trainable = layer, trainable

    def before_train_epoch(self, runner: Any) -> None:
        if runner.epoch == 1:
            runner.strategy.module.net[self.layer].requires_grad_(self.trainable)


def changed(folder: Path, strategy: str, trainable: bool) -> dict[str, Any] | str:
    model = HalfFrozen if trainable else partial(HalfFrozen, set())
    try:
        return trained(folder, strategy, 2, model, exclude=False, custom_hooks=[Change(0, trainable)])
    except StrategyError as error:
        return str(error)


@pytest.mark.parametrize(
    "strategy",
    [
        "ddp",
        pytest.param("zero1", marks=pytest.mark.deepspeed),
        pytest.param("zero3", marks=[pytest.mark.deepspeed, pytest.mark.full]),
    ],
)
def test_a_layer_that_gets_no_common_gradients_is_not_thawed(
    tmp_path: Path, workers2: WorkerGroup, strategy: str
) -> None:
    """Under DDP each process would train it on its own data, under ZeRO none would."""
    for message in workers2.run(changed, tmp_path, strategy, True):
        assert "net.0.weight is trainable now and was frozen when training was set up" in message


@pytest.mark.deepspeed
def test_a_layer_whose_moments_would_move_it_on_is_not_frozen(tmp_path: Path, workers2: WorkerGroup) -> None:
    for message in workers2.run(changed, tmp_path, "zero1", False):
        assert "net.0.weight is frozen now and was trainable when training was set up" in message


@pytest.mark.full
def test_fsdp_thaws(tmp_path: Path, workers2: WorkerGroup) -> None:
    first, second = workers2.run(changed, tmp_path / "thawed", "fsdp", True)
    (frozen, _) = workers2.run(trained, tmp_path / "frozen", "fsdp", 2)
    assert isinstance(first, dict)
    assert isinstance(second, dict)
    assert torch.equal(first["model.net.0.weight"], second["model.net.0.weight"])
    assert not torch.equal(first["model.net.0.weight"], frozen["model.net.0.weight"])


def test_parameters_that_nobody_brings() -> None:
    with pytest.raises(
        ConfigError, match="^strategy.exclude_frozen_parameters: a checkpoint without them leaves them at"
    ):
        FSDPStrategy(exclude_frozen_parameters=True, skip_init_weights=True)
