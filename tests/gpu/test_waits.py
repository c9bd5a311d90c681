"""Between two log lines the host waits for nothing on the device: torch itself raises where it would (CUDA's sync debug mode)."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from flextrain import Hook

from .runs import ADAMW, INTERVAL, Classifier, make_runner

pytestmark = pytest.mark.cuda
WARM_UP = INTERVAL  # updates in which libraries make their handles, and optimizers their state


class Forbids(Hook):
    """From the second log line on, forbids to wait in all updates but those that end with a line."""

    priority = "LOWEST"

    def __init__(self) -> None:
        self.watched = 0

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Mapping[str, Any] | None = None
    ) -> None:
        following = runner.iter + 2
        forbidden = following > WARM_UP and following % INTERVAL != 0
        torch.cuda.set_sync_debug_mode("error" if forbidden else "default")
        self.watched += forbidden


class Allows(Hook):
    """Lifts the ban before an epoch's end, which saves and evaluates."""

    priority = "HIGHEST"

    def after_train_epoch(self, runner: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")


class ReadsTheLoss(Hook):
    """What must not be done."""

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Mapping[str, Any] | None = None
    ) -> None:
        assert outputs is not None
        outputs["loss"].item()


class Counts(Classifier):
    """The mean over the items of a batch that count."""

    def forward(self, x: Tensor, y: Tensor, mode: str = "loss") -> Any:
        counted = y != 3
        losses = functional.cross_entropy(self.head(self.features(x)), y, reduction="none") * counted
        return {"loss": losses.sum() / counted.sum()}

    def loss_weight(self, data_batch: Any) -> Tensor:
        return (data_batch[1] != 3).sum()


class OwnStep(Classifier):
    """MMEngine's train_step."""

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        with optim_wrapper.optim_context(self):
            losses = self(*data)
        optim_wrapper.update_params(losses["loss"])
        return dict(losses)


class Taught(Classifier):
    """With an average of a part of it beside that."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.head).requires_grad_(False)


RECIPES: dict[str, dict[str, Any]] = {
    "plain": dict(optim_wrapper=dict(optimizer=ADAMW)),
    "not fused": dict(optim_wrapper=dict(optimizer={**ADAMW, "fused": False})),
    "clipped": dict(optim_wrapper=dict(optimizer=ADAMW, clip_grad=dict(max_norm=0.5))),
    "accumulated": dict(optim_wrapper=dict(optimizer=ADAMW, accumulative_counts=2), epochs=4),
    "bfloat16": dict(optim_wrapper=dict(type="AmpOptimWrapper", dtype="bfloat16", optimizer=ADAMW)),
    "averaged and scheduled": dict(
        custom_hooks=[dict(type="EMAHook")], param_scheduler=dict(type="LinearLR", end=10, by_epoch=False)
    ),
    "weighted": dict(model=Counts, optim_wrapper=dict(optimizer=ADAMW, accumulative_counts=2), epochs=4),
    "own step": dict(model=OwnStep, optim_wrapper=dict(optimizer=ADAMW, accumulative_counts=2), epochs=4),
    "clipped by value": dict(optim_wrapper=dict(optimizer=ADAMW, clip_grad=dict(type="value", clip_value=0.1))),
    "taught": dict(
        model=Taught, custom_hooks=[dict(type="TeacherHook", student="head", teacher="teacher", momentum=0.01)]
    ),
}
STRATEGIES = {
    "single": dict(type="SingleDeviceStrategy"),
    "FSDP": dict(type="FSDPStrategy", wrap=["Sequential"]),
}


def watched(folder: Path, kind: str, **changes: Any) -> int:
    """How many updates were watched; raises where one of them waits."""
    forbids = Forbids()
    hooks = [*changes.pop("custom_hooks", []), forbids, Allows()]
    runner = make_runner(folder, kind, custom_hooks=hooks, epochs=changes.pop("epochs", 2), **changes)
    try:
        runner.train()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        runner.strategy.leave()
    return forbids.watched


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nothing_waits(tmp_path: Path, kind: str, strategy: str, recipe: str) -> None:
    assert watched(tmp_path, kind, strategy=STRATEGIES[strategy], **RECIPES[recipe]) >= 6


def test_a_hook_that_reads_the_loss_is_found(tmp_path: Path, kind: str) -> None:
    with pytest.raises(RuntimeError, match="synchronizing"):
        watched(tmp_path, kind, custom_hooks=[ReadsTheLoss()])
