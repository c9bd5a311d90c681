"""Checkpoints without frozen parameters: what they lack, and who brings it when a run goes on."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flextrain import CheckpointError, DDPStrategy, FlexibleRunner, Hook, StrategyError
from flextrain.core.checkpoint import Checkpoint
from flextrain.core.checkpoint.replicas import FrozenPrints
from flextrain.core.comm import collectives as dist
from flextrain.testing import WorkerGroup
from flextrain.testing.loop import alone as alone_here

from .training import Net, Samples, make_runner, whole, whole_state

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("quick")]

STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": dict(type="DDPStrategy"),
    "fsdp": dict(type="FSDPStrategy", wrap=["Linear"]),
    "zero1": dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=1)),
    "zero3": dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=3)),
    "tp2": dict(type="MeshStrategy", tp=2, plan={"net.0": "colwise", "net.3": "rowwise"}),
    "half": dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=2), bf16=dict(enabled=True)),
}
FROZEN = {"net.0.weight", "net.0.bias"}
MARKS: dict[str, Any] = {"zero1": pytest.mark.deepspeed, "zero3": pytest.mark.deepspeed, "tp2": pytest.mark.full}
ALL = [pytest.param(name, marks=MARKS.get(name, ())) for name in STRATEGIES if name != "half"]


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
        return {key: whole(value) for key, value in state.items()}
    finally:
        runner.strategy.leave()


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
    of_whole = FrozenPrints().of({name: whole[0][f"model.{name}"] for name in FROZEN})
    assert Checkpoint.open(tmp_path / "first" / "epoch_1").values["left_out"] == of_whole
    for found, expected in zip(workers2.run(resumed, tmp_path, strategy), whole, strict=True):
        assert isinstance(found, dict)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[k], v) for k, v in expected.items() if isinstance(v, Tensor))


def test_the_model_brings_them_and_a_checkpoint_that_has_them_counts(tmp_path: Path, workers2: WorkerGroup) -> None:
    workers2.run(trained, tmp_path / "first", "fsdp", 1)
    for message in workers2.run(resumed, tmp_path, "fsdp", seed=5):
        assert message.startswith(
            f"{tmp_path / 'first' / 'epoch_1'}: was saved without its frozen parameters, and net.0.bias and 1 other are not as in "
        )
    (whole, _) = workers2.run(trained, tmp_path / "first", "fsdp", 1, exclude=False)
    (found, _) = workers2.run(resumed, tmp_path, "fsdp", seed=5)
    assert isinstance(found, dict)
    assert torch.equal(found["model.net.0.weight"], whole["model.net.0.weight"])


def alone(folder: Path, **changes: Any) -> FlexibleRunner:
    return make_runner(
        folder,
        model=changes.pop("model", HalfFrozen),
        strategy=dict(type="SingleDeviceStrategy", exclude_frozen_parameters=True, device="cpu"),
        train_dataloader=dict(batch_size=8, dataset=Samples(16), collate_fn="default_collate"),
        train_cfg=dict(max_epochs=2),
        default_hooks=dict(checkpoint=dict(type="CheckpointHook", interval=1)),
        **changes,
    )


class Writes(Hook):
    """Writes to a frozen parameter before the second epoch."""

    def before_train_epoch(self, runner: Any) -> None:
        if runner.epoch == 1:
            self.before = runner.strategy.module.net[0].weight.detach().clone()
            with torch.no_grad():
                runner.strategy.module.net[0].weight[0, 0] += 1


def test_the_base_of_a_resumed_run_is_that_of_the_first(tmp_path: Path) -> None:
    run = alone(tmp_path / "first", randomness=dict(seed=1), custom_hooks=[hook := Writes()])
    run.train()
    base = tmp_path / "base.pth"
    weights = {name: tensor.clone() for name, tensor in run.strategy.module.state_dict().items()}
    written = {name: tensor.clone() for name, tensor in weights.items()}
    weights["net.0.weight"] = hook.before
    for name, held, refused in (("epoch_1", weights, written), ("epoch_2", written, weights)):
        path = tmp_path / "first" / name
        torch.save(refused, base)
        again = alone(tmp_path / name, randomness=dict(seed=5), resume=str(path))
        again.load_checkpoint(base)
        with pytest.raises(CheckpointError, match="net.0.weight is not as in that run; build the model with the same"):
            again.train()
        torch.save(held, base)
        again = alone(tmp_path / name, randomness=dict(seed=5), resume=str(path))
        again.load_checkpoint(base)
        again.train()


def prints_of_stages() -> dict[str, str]:
    """In a worker: those of two stages of a pipeline, which both hold a tied parameter."""
    strategy = DDPStrategy(device="cpu")
    strategy.join()
    whole = dict(HalfFrozen().named_parameters())
    names = [{"net.0.weight", "net.0.bias"}, {"net.0.weight", "net.3.bias"}][dist.get_rank()]
    for name, parameter in whole.items():
        torch.nn.init.constant_(parameter, len(name))
    found = FrozenPrints().of({name: whole[name] for name in names})
    with alone_here():
        assert found == FrozenPrints().of({name: whole[name] for name in found})
    strategy.leave()
    return found


def test_fingerprints_of_a_pipeline(workers2: WorkerGroup) -> None:
    for found in workers2.run(prints_of_stages):
        assert found.keys() == {"net.0.weight", "net.0.bias", "net.3.bias"}


def test_a_checkpoint_without_fingerprints_resumes_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(FrozenPrints, "of", lambda *_: {})
        alone(tmp_path / "first", randomness=dict(seed=1)).train()
    path = tmp_path / "first" / "epoch_1"
    assert "left_out" not in Checkpoint.open(path).values
    alone(tmp_path / "again", randomness=dict(seed=5), resume=str(path)).train()


@pytest.mark.full
@pytest.mark.deepspeed
def test_frozen_parameters_in_half_precision_are_compared_with_their_like(
    tmp_path: Path, workers2: WorkerGroup
) -> None:
    workers2.run(trained, tmp_path / "first", "half", 1)
    assert all(isinstance(found, dict) for found in workers2.run(resumed, tmp_path, "half"))
    assert all("not as in that run" in found for found in workers2.run(resumed, tmp_path, "half", seed=5))
    assert all(isinstance(found, dict) for found in workers2.run(resumed, tmp_path, "ddp", log_level="INFO"))
    log = "".join(file.read_text() for file in (tmp_path / "again").rglob("*.log"))
    assert "because their dtype is another: float32, and bfloat16 then" in log


@pytest.mark.full
@pytest.mark.deepspeed
def test_a_run_goes_on_under_another_strategy(tmp_path: Path, workers2: WorkerGroup) -> None:
    workers2.run(trained, tmp_path / "first", "zero3", 1)
    for strategy in ("ddp", "fsdp", "zero1", "tp2"):
        assert all(isinstance(found, dict) for found in workers2.run(resumed, tmp_path, strategy)), strategy
        assert all("not as in that run" in found for found in workers2.run(resumed, tmp_path, strategy, seed=5))


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
