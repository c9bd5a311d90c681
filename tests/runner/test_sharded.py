"""Whole runs under a sharding strategy: the same as under DDP, hooks included, and each goes on from the other's checkpoint."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from flextrain import BaseMetric, BaseModel, Hook, StrategyError
from flextrain.testing import WorkerGroup

from .training import SGD, At, Net, Samples, SaveEvery, Watch, make_runner, validation, whole_state

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("quick")]

DDP = dict(type="DDPStrategy")
FSDP = dict(type="FSDPStrategy", wrap=["Linear"])
ZERO = [dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=stage)) for stage in range(4)]
SETTINGS: dict[str, Any] = dict(
    model=partial(Net, dropout=0.0),
    train_dataloader=dict(batch_size=2, dataset=Samples(26), collate_fn="default_collate"),
    optim_wrapper=dict(optimizer=dict(type="AdamW", lr=0.02), accumulative_counts=2, clip_grad=dict(max_norm=0.5)),
    param_scheduler=dict(type="LinearLR", start_factor=0.1, end=2, convert_to_iter_based=True),
    custom_hooks=[dict(type="EMAHook", momentum=0.1)],
    **validation(9),  # five for one process and four for the other: a batch more and a batch less
)


def with_zero(*values: Any, name: str) -> Any:
    """A case that needs DeepSpeed."""
    return pytest.param(*values, id=name, marks=pytest.mark.deepspeed)


class Metrics(Hook):
    """The metrics of every validation."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def after_val_epoch(self, runner: Any, metrics: dict[str, Any] | None = None) -> None:
        self.seen.append(metrics)


def trained(folder: str, strategy: dict[str, Any], more: list[Any] | None = None, **changes: Any) -> dict[str, Any]:
    """Everything that training has changed, whole, and what was seen on the way."""
    watch, metrics = Watch(), Metrics()
    hooks = [*SETTINGS["custom_hooks"], watch, metrics, *(more or [])]
    runner = make_runner(folder, **{**SETTINGS, "strategy": strategy, **changes, "custom_hooks": hooks})
    runner.train()
    runner.val()
    state = {key: value for key, value in whole_state(runner).items() if isinstance(value, Tensor)}
    runner.strategy.leave()
    losses = [float(loss) for loss in watch.losses]
    return {"state": state, "metrics": metrics.seen, "losses": losses, "trained": watch.trained}


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["state"].keys() == expected["state"].keys()
    for key, value in expected["state"].items():
        torch.testing.assert_close(
            found["state"][key], value, rtol=1e-5, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}"
        )
    assert found["metrics"] == expected["metrics"][-len(found["metrics"]) :]


@pytest.mark.parametrize(
    "strategy",
    [pytest.param(FSDP, id="fsdp"), *(with_zero(ZERO[stage], name=f"zero{stage}") for stage in (1, 2, 3))],
)
def test_a_run_is_the_same_under_both(tmp_path: Path, workers2: WorkerGroup, strategy: dict[str, Any]) -> None:
    ddp = workers2.run(trained, str(tmp_path / "ddp"), DDP)
    sharded = workers2.run(trained, str(tmp_path / "sharded"), strategy)
    for one, other in zip(sharded, ddp, strict=True):
        same(one, other)
        assert one["losses"] == pytest.approx(other["losses"], rel=1e-5)
        assert one["trained"] == other["trained"]
    assert [metrics["count"] for metrics in ddp[0]["metrics"]] == [9] * 4, "one after each epoch, and one at the end"
    assert any(key.startswith("hook.") for key in ddp[0]["state"]), "averages are compared too"


@pytest.mark.parametrize("strategy", [pytest.param(FSDP, id="fsdp"), with_zero(ZERO[3], name="zero3")])
@pytest.mark.parametrize("is_built", [True, False], ids=["instance", "function"])
def test_averages_of_parts_of_different_sizes(
    tmp_path: Path, workers2: WorkerGroup, strategy: dict[str, Any], is_built: bool
) -> None:
    """Seven rows on two processes."""
    torch.manual_seed(1)
    model = Net(7, dropout=0.0) if is_built else partial(Net, 7, dropout=0.0)
    loader = {**SETTINGS["train_dataloader"], "batch_size": 4}
    single = dict(type="SingleDeviceStrategy", device="cpu")
    expected = trained(str(tmp_path / "single"), single, model=copy.deepcopy(model), train_dataloader=loader)["state"]
    averages = [key for key in expected if key.startswith("hook.")]
    assert len(averages) == 4
    for found in workers2.run(trained, str(tmp_path / "sharded"), strategy, model=model):
        for key in averages:
            torch.testing.assert_close(found["state"][key], expected[key], rtol=1e-5, atol=1e-6)
            assert not torch.equal(expected[key], expected[key.replace("hook.averaged", "model")])


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        pytest.param(DDP, FSDP, id="ddp-fsdp"),
        pytest.param(FSDP, DDP, id="fsdp-ddp"),
        pytest.param(FSDP, FSDP, id="fsdp-fsdp"),
        with_zero(DDP, ZERO[3], name="ddp-zero3"),
        with_zero(ZERO[3], DDP, name="zero3-ddp"),
        with_zero(ZERO[3], FSDP, name="zero3-fsdp"),
    ],
)
def test_each_goes_on_in_the_middle_of_an_epoch(
    tmp_path: Path, workers2: WorkerGroup, saved: dict[str, Any], resumed: dict[str, Any]
) -> None:
    whole = workers2.run(trained, str(tmp_path / "whole"), saved, [SaveEvery({5})])
    rest = workers2.run(trained, str(tmp_path / "rest"), resumed, resume=str(tmp_path / "whole" / "iter_5"))
    for found, expected in zip(rest, whole, strict=True):
        same(found, expected)
        assert found["trained"] == expected["trained"][5:]
        assert found["losses"] == pytest.approx(expected["losses"][5:], rel=1e-5)


def test_weights_of_a_file_are_dealt_out(tmp_path: Path, workers2: WorkerGroup) -> None:
    torch.manual_seed(7)
    weights = Net(dropout=0.0).state_dict()
    torch.save(weights, tmp_path / "weights.pth")
    changes = dict(load_from=str(tmp_path / "weights.pth"), optim_wrapper=dict(optimizer={**SGD, "lr": 0.0}))
    for found in workers2.run(trained, str(tmp_path / "run"), FSDP, **changes):
        for name, value in weights.items():
            assert torch.equal(found["state"][f"model.{name}"], value)


class Normalised(nn.Module):
    """Its running statistics are those of what a process has trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, 2)
        self.seen: list[list[float]] = []

    def forward(self, index: Any, x: Tensor, y: Tensor, mode: str = "tensor") -> Any:
        logits = self.head(self.norm(x))
        if mode == "loss":
            return {"loss": functional.cross_entropy(logits, y)}
        self.seen.append(statistics(self))
        return logits


def statistics(model: nn.Module) -> list[float]:
    return torch.cat([b for b in model.buffers() if b.is_floating_point()]).tolist()


class Sum(BaseMetric):
    """The sum of the first logits of all samples."""

    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results += data_samples[:, 0].tolist()

    def compute_metrics(self, results: list[Any]) -> dict[str, Any]:
        return {"sum": sum(results)}


NORMALISED: dict[str, Any] = dict(
    model=Normalised,
    train_dataloader=dict(batch_size=4, dataset=Samples(24), collate_fn="default_collate"),
    **{**validation(9), "val_evaluator": dict(type=Sum)},
)


def validated(folder: str, strategy: dict[str, Any], more: list[Any], **changes: Any) -> dict[str, Any]:
    """Statistics before validation and in each of its forwards, its metrics, and the statistics of what was trained on."""
    own, metrics, watch = list[list[float]](), Metrics(), Watch()
    look = At("before_val", lambda runner: own.append(statistics(runner.strategy.module)))
    runner = make_runner(folder, **NORMALISED, strategy=strategy, custom_hooks=[look, metrics, watch, *more], **changes)
    runner.train()
    seen = runner.strategy.module.seen
    runner.strategy.leave()
    alone = nn.BatchNorm1d(6)
    for indices in watch.trained:
        alone(NORMALISED["train_dataloader"]["dataset"].x[indices])
    return {"own": own[-1], "seen": seen, "metrics": metrics.seen, "alone": statistics(alone)}


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param({**DDP, "broadcast_buffers": False}, id="ddp"),
        pytest.param(FSDP, id="fsdp"),
        with_zero(ZERO[1], name="zero1"),
        with_zero(ZERO[3], name="zero3"),
    ],
)
def test_all_processes_evaluate_with_the_statistics_of_one(
    tmp_path: Path, workers2: WorkerGroup, strategy: dict[str, Any]
) -> None:
    """Those that a checkpoint has: one process that loads it finds the same metrics."""
    saving = dict(train_cfg=dict(max_epochs=1), default_hooks=dict(checkpoint=dict(interval=1)))
    first, second = workers2.run(validated, str(tmp_path / "run"), strategy, [], **saving)
    assert first["own"] != second["own"], "each has seen other samples"
    assert first["seen"] == [first["own"]] * 2
    assert second["seen"] == [first["own"]] * 2
    alone = make_runner(tmp_path / "alone", **NORMALISED, load_from=str(tmp_path / "run" / "epoch_1"))
    assert first["metrics"] == second["metrics"] == [pytest.approx(alone.val(), rel=1e-6)]


@pytest.mark.parametrize(
    "strategy", [pytest.param(DDP, id="ddp"), pytest.param(FSDP, id="fsdp"), with_zero(ZERO[2], name="zero2")]
)
def test_evaluation_has_the_means_of_what_processes_trained_on(
    tmp_path: Path, workers2: WorkerGroup, strategy: dict[str, Any]
) -> None:
    iterations = dict(train_cfg=dict(by_epoch=False, max_iters=3, val_interval=3))
    first, second = workers2.run(validated, str(tmp_path), strategy, [dict(type="SyncBuffersHook")], **iterations)
    means = [(a + b) / 2 for a, b in zip(first["alone"], second["alone"], strict=True)]
    assert first["seen"][0] == second["seen"][0] == pytest.approx(means, rel=1e-5)
    assert first["alone"] != pytest.approx(means, rel=1e-2), "each has seen other samples"


class InitialisedByRunner(Net, BaseModel):
    """Draws the weights of a layer again, in a way that needs its shape."""

    def init_weights(self) -> None:
        nn.init.xavier_normal_(self.net[0].weight)  # type: ignore[arg-type]


class Layer(nn.Linear):
    def init_weights(self) -> None:
        nn.init.xavier_normal_(self.weight)


class InitialisedByParts(Net, BaseModel):
    """Has no say of its own, but its parts have."""

    def __init__(self, dropout: float) -> None:
        super().__init__(dropout=dropout)
        self.net[0] = Layer(6, 8)


class InitialisedByItself(Net):
    """As models of other libraries do; a second call would draw other numbers."""

    def __init__(self, dropout: float) -> None:
        super().__init__(dropout=dropout)
        self.init_weights()

    def init_weights(self) -> None:
        nn.init.xavier_normal_(self.net[0].weight)  # type: ignore[arg-type]


class InitialisedByName(Net):
    """With a function of the submodule under this name."""

    def __init__(self, dropout: float) -> None:
        super().__init__(dropout=dropout)
        self.apply(self.init_weights)

    def init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.xavier_normal_(module.weight)


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        pytest.param(FSDP, InitialisedByRunner, id="fsdp-runner"),
        pytest.param(FSDP, InitialisedByParts, id="fsdp-parts"),
        pytest.param(FSDP, InitialisedByItself, id="fsdp-itself"),
        pytest.param(FSDP, InitialisedByName, id="fsdp-name"),
        with_zero(ZERO[3], InitialisedByRunner, name="zero3-runner"),
        with_zero(ZERO[3], InitialisedByParts, name="zero3-parts"),
    ],
)
def test_training_begins_with_the_same_weights(
    tmp_path: Path, workers2: WorkerGroup, strategy: dict[str, Any], kind: type[Net]
) -> None:
    changes = dict(model=partial(kind, dropout=0.0), optim_wrapper=dict(optimizer={**SGD, "lr": 0.0}))
    single = dict(type="SingleDeviceStrategy", device="cpu")
    expected = trained(str(tmp_path / "single"), single, **changes)["state"]
    for found in workers2.run(trained, str(tmp_path / "sharded"), strategy, **changes):
        for name, _ in Net().named_parameters():
            assert torch.equal(found["state"][f"model.{name}"], expected[f"model.{name}"]), name


class OwnStep(Net, BaseModel):
    """Says itself what a training step is."""

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        loss = self(**data, mode="loss")["loss"]
        optim_wrapper.update_params(loss)
        return {"loss": loss}


TWO_OPTIMIZERS = dict(one=dict(optimizer=SGD), two=dict(optimizer=SGD))


@pytest.mark.deepspeed
def test_micro_batches_that_only_the_strategy_speaks_of_make_one_update(tmp_path: Path, workers2: WorkerGroup) -> None:
    optim_wrapper = {key: value for key, value in SETTINGS["optim_wrapper"].items() if key != "accumulative_counts"}
    strategy = dict(ZERO[2], gradient_accumulation_steps=2)
    found = workers2.run(trained, str(tmp_path / "zero"), strategy, optim_wrapper=optim_wrapper)
    for one, other in zip(found, workers2.run(trained, str(tmp_path / "ddp"), DDP), strict=True):
        assert one["losses"] == pytest.approx(other["losses"], rel=1e-5)
        same(one, other)


def refusal(folder: str, strategy: dict[str, Any], changes: dict[str, Any]) -> str:
    """Before there is a process group."""
    with pytest.raises(StrategyError) as caught:
        make_runner(folder, strategy=strategy, **changes)
    return str(caught.value)


@pytest.mark.deepspeed
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            dict(model=OwnStep),
            "model: OwnStep defines its own train_step, which DeepSpeed's engine cannot see; define forward instead, or "
            "choose another strategy",
        ),
        (
            dict(model=OwnStep, optim_wrapper=TWO_OPTIMIZERS),
            'optim_wrapper.type: "OptimWrapperDict" has several optimizers, DeepSpeed\'s engine has one',
        ),
    ],
    ids=["own step", "two optimizers"],
)
def test_what_an_engine_cannot_train_is_refused(
    tmp_path: Path, workers2: WorkerGroup, changes: dict[str, Any], message: str
) -> None:
    assert workers2.run(refusal, str(tmp_path), ZERO[2], changes) == [message, message]
