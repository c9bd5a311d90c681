"""Through FlexibleRunner, with its data loading, hooks and schedulers: every strategy trains as a single device does."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from flextrain import BaseMetric, BaseModel, FlexibleRunner, Hook, OptimWrapper, OptimWrapperDict
from flextrain.core.comm.collectives import all_reduce
from flextrain.testing import WorkerGroup
from flextrain.testing.differences import same_numbers, same_tensors
from flextrain.testing.loop import alone
from flextrain.testing.models import ConformanceNet, ConvNet, Mlp, TinyTransformer
from flextrain.testing.sessions import whole_model

from ..device import DEVICE

pytestmark = pytest.mark.distributed

SAMPLES = 44  # five global batches of 8 and one of 4
BATCH = 8
TOLERANCE = 1e-6  # see test_parity.py
DDP, FSDP = dict(type="DDPStrategy"), dict(type="FSDPStrategy", wrap=["Linear"])
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": DDP,
    "fsdp": FSDP,
    **{f"zero{stage}": dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=stage)) for stage in (1, 2, 3)},
}

ADAMW = dict(type="AdamW", lr=2e-3, weight_decay=0.05)
MOMENTUM = dict(type="SGD", lr=0.02, momentum=0.9, weight_decay=1e-3)


@dataclass
class History(Hook):
    """What each update gave, over all processes."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float | None] = field(default_factory=list)
    lrs: list[list[float]] = field(default_factory=list)

    def before_train_iter(self, runner: FlexibleRunner, batch_idx: int, data_batch: Any = None) -> None:
        self.lrs.append([group["lr"] for group in runner.optim_wrapper.param_groups])

    def after_train_iter(
        self, runner: FlexibleRunner, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        self.losses.append(float(all_reduce(outputs["loss"].clone(), "mean")))
        norm = outputs.get("grad_norm")
        self.grad_norms.append(None if norm is None else float(norm))


class Correct(BaseMetric):
    """How many predictions are right, and of how many."""

    def process(self, data_batch: Any, data_samples: Any) -> None:
        predicted, target = data_samples
        self.results += (predicted == target).float().view(len(target), -1).mean(1).tolist()

    def compute_metrics(self, results: list[Any]) -> dict[str, Any]:
        return {"correct": sum(results), "count": len(results)}


class OwnTrainStep(BaseModel):
    """A model that defines its own step, which no wrapper around forward sees."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Mlp()

    def train_step(self, data: Any, optim_wrapper: OptimWrapper) -> dict[str, Tensor]:
        data = self.data_preprocessor(data, True)
        with optim_wrapper.optim_context(self):
            loss = self.net(**data)["loss"]
        optim_wrapper.update_params(loss)
        return {"loss": loss}

    sample = Mlp.sample


class TwoPlayers(BaseModel):
    """Two optimizers: one net learns the classes, the other to guess the first one's confidence, in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.player = Mlp()
        self.judge = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))

    def train_step(self, data: Any, optim_wrapper: OptimWrapperDict) -> dict[str, Tensor]:
        data = self.data_preprocessor(data, True)
        logits = self.player.logits(data["x"])
        confidence = functional.log_softmax(logits, -1).gather(1, data["y"][:, None])
        loss_judge = (self.judge(logits.detach()) - confidence.detach()).square().mean()
        optim_wrapper["judge"].update_params(loss_judge)
        loss_player = -confidence.mean() + 0.1 * self.judge(logits).square().mean()
        optim_wrapper["player"].update_params(loss_player)
        self.judge.zero_grad()
        return {"loss": loss_judge + loss_player, "loss_judge": loss_judge}

    sample = Mlp.sample


def dataset(
    model: Any, count: int, seed: int, ragged: bool = False, strained: int | None = None
) -> list[dict[str, Tensor]]:
    batch = model.sample(count, seed)
    items = [{name: values[i] for name, values in batch.items()} for i in range(count)]
    for i, item in enumerate(items):
        if ragged:
            item["y"][: i % 4] = -100
        if strained is not None:
            item["strain"] = torch.tensor(torch.inf if i == strained else 0.0)
    return items


@contextlib.contextmanager
def runner(strategy: dict[str, Any], folder: Path, world_size: int, model: Any, **options: Any) -> Iterator[Any]:
    """A runner whose batches over all processes are those of one process; torn down at the end."""
    data = dict(dataset=dataset(model, SAMPLES, 0, **options.pop("data", {})), collate_fn=dict(type="default_collate"))
    held_out = dict(dataset=dataset(model, 21, 1), collate_fn=dict(type="default_collate"), batch_size=2)
    history = History()
    validates = options.pop("validates", False)
    made = FlexibleRunner(
        model=model,
        work_dir=folder,
        strategy={**strategy, "device": DEVICE},
        train_dataloader=dict(
            batch_size=BATCH // world_size, sampler=dict(type="DefaultSampler", shuffle=True), **data
        ),
        custom_hooks=[history],
        default_hooks=dict(checkpoint=None),
        # Each process draws its own weights: the strategy must make them agree.
        randomness=dict(seed=7, diff_rank_seed=True),
        val_dataloader=held_out if validates else None,
        val_cfg=dict() if validates else None,
        val_evaluator=dict(type=Correct) if validates else None,
        **options,
    )
    made.history = history
    try:
        yield made
    finally:
        made.strategy.leave()


@dataclass
class Result:
    history: History
    weights: dict[str, Tensor]
    metrics: dict[str, Any]


def run(strategy: dict[str, Any], folder: Path, world_size: int, **options: Any) -> Result:
    with runner(strategy, folder, world_size, **options) as made:
        made.train()
        metrics = made.val() if options.get("validates") else {}
        return Result(made.history, whole_model(made.strategy), metrics)


@functools.cache
def of_one_process(case: str) -> Result:
    """The run of one process, which every worker makes for itself, once for all strategies."""
    with alone(), tempfile.TemporaryDirectory() as folder:
        return run(dict(type="SingleDeviceStrategy"), Path(folder), 1, **CASES[case])


def both(strategy: dict[str, Any], folder: Path, case: str) -> tuple[Result, Result]:
    """In a worker: the run under the strategy, and that of one process."""
    expected = of_one_process(case)
    return run(strategy, folder, int(os.environ["WORLD_SIZE"]), **CASES[case]), expected


def assert_same(found: Result, expected: Result) -> None:
    same_numbers(found.history.losses, expected.history.losses, "the loss", TOLERANCE)
    same_numbers(found.history.grad_norms, expected.history.grad_norms, "the gradient norm", TOLERANCE)
    same_tensors(found.weights, expected.weights, "final weights", TOLERANCE)
    assert found.weights.keys() == expected.weights.keys()
    assert found.history.lrs == expected.history.lrs
    assert found.metrics == expected.metrics


EPOCHS = dict(train_cfg=dict(by_epoch=True, max_epochs=4))  # of 6 micro-batches
SCHEDULE = dict(
    param_scheduler=[
        dict(type="LinearLR", start_factor=0.1, by_epoch=False, begin=0, end=10),
        dict(type="CosineAnnealingLR", T_max=5, by_epoch=True, convert_to_iter_based=True),
    ]
)
CASES: dict[str, dict[str, Any]] = {
    "plain": dict(model=Mlp, optim_wrapper=dict(optimizer=ADAMW), validates=True, **EPOCHS, **SCHEDULE),
    "clip": dict(model=ConvNet, optim_wrapper=dict(optimizer=MOMENTUM, clip_grad=dict(max_norm=0.2)), **EPOCHS),
    "accumulate": dict(
        model=TinyTransformer,
        # Six micro-batches in windows of four: each epoch ends with one of two.
        optim_wrapper=dict(optimizer=ADAMW, accumulative_counts=4, clip_grad=dict(max_norm=1.0)),
        train_cfg=dict(by_epoch=True, max_epochs=9),
        validates=True,
        **SCHEDULE,
    ),
    "ragged": dict(
        model=TinyTransformer,
        optim_wrapper=dict(optimizer=MOMENTUM, accumulative_counts=2),
        data=dict(ragged=True),
        train_cfg=dict(by_epoch=False, max_iters=18),
    ),
    "train-step": dict(
        model=OwnTrainStep,
        optim_wrapper=dict(optimizer=MOMENTUM, accumulative_counts=4),
        train_cfg=dict(by_epoch=True, max_epochs=9),
        **SCHEDULE,
    ),
    "two-optimizers": dict(
        model=TwoPlayers,
        optim_wrapper=dict(
            player=dict(optimizer=ADAMW),
            judge=dict(optimizer=MOMENTUM, clip_grad=dict(max_norm=0.1)),
        ),
        train_cfg=dict(by_epoch=True, max_epochs=4),
    ),
}


def pairs() -> list[Any]:
    """Every case of one optimizer with every strategy; DeepSpeed has no engine for a model that defines its own step."""
    return [
        pytest.param(strategy, case, marks=[pytest.mark.deepspeed] if "zero" in strategy else [])
        for strategy in STRATEGIES
        for case in CASES
        if case != "two-optimizers" and not ("zero" in strategy and case == "train-step")
    ]


@pytest.mark.parametrize("strategy, case", pairs())
def test_parity(workers2: WorkerGroup, tmp_path: Path, strategy: str, case: str) -> None:
    for found, expected in workers2.run(both, STRATEGIES[strategy], tmp_path, case):
        assert len(found.history.losses) >= 18
        assert_same(found, expected)
        if CASES[case].get("validates"):
            assert found.metrics["count"] == 21


@pytest.mark.parametrize("strategy", [DDP, FSDP], ids=["ddp", "fsdp"])
def test_parity_with_several_optimizers(workers2: WorkerGroup, tmp_path: Path, strategy: dict[str, Any]) -> None:
    for found, expected in workers2.run(both, strategy, tmp_path, "two-optimizers"):
        assert_same(found, expected)


def overflow(folder: Path) -> tuple[History, list[Any]]:
    options = dict(
        optim_wrapper=dict(
            type="AmpOptimWrapper", optimizer=MOMENTUM, dtype="float16", loss_scale=dict(init_scale=256.0)
        ),
        # One sample in 44, so one update in each epoch of six, and one process.
        data=dict(strained=17),
        train_cfg=dict(by_epoch=True, max_epochs=2),
        param_scheduler=dict(type="ExponentialLR", gamma=0.5, by_epoch=False),
    )
    with runner(DDP, folder, 2, model=ConformanceNet, **options) as made:
        made.train()
        return made.history, [scheduler.last_step for scheduler in made.param_schedulers]


def test_schedulers_stand_still_on_all_processes_when_an_update_is_skipped(
    workers2: WorkerGroup, tmp_path: Path
) -> None:
    first, second = workers2.run(overflow, tmp_path)
    assert first[0].lrs == second[0].lrs
    lrs = [lr for (lr,) in first[0].lrs]
    still = [i for i in range(1, len(lrs)) if lrs[i] == lrs[i - 1]]
    infinite = [i + 1 for i, loss in enumerate(first[0].losses) if not loss < float("inf")]
    assert len(lrs) == 12
    assert len(infinite) == 2
    assert still == [i for i in infinite if i < len(lrs)]
    assert first[1] == second[1] == [12 - 2]


def test_units_that_stay_gathered_for_backward_are_freed_after_validation(
    workers2: WorkerGroup, tmp_path: Path
) -> None:
    for found, expected in workers2.run(both, FSDP | dict(reshard_after_forward=False), tmp_path, "plain"):
        assert_same(found, expected)
