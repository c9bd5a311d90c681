"""Between two log lines nothing is copied from the device, and nothing waits for it: counted through the whole runner."""

from __future__ import annotations

import copy
import os
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from flextrain import FlexibleRunner, Hook

from .training import ADAMW, Classifier, make_runner

pytestmark = [pytest.mark.npu, pytest.mark.distributed]
INTERVAL = 4  # of the log lines; eight updates in an epoch


class Marks(Hook):
    """Knows which update the loop is in, 0 between epochs: one begins when the last hook of the one before is done."""

    priority = "LOWEST"

    def __init__(self) -> None:
        self.done = self.update = 0

    def before_train_epoch(self, runner: FlexibleRunner) -> None:
        self.update = self.done + 1

    def after_train_iter(
        self, runner: FlexibleRunner, batch_idx: int, data_batch: Any = None, outputs: Mapping[str, Any] | None = None
    ) -> None:
        self.done += 1
        self.update = self.done + 1


class EndsEpoch(Hook):
    """Comes before the hooks that write checkpoints at the end of an epoch."""

    priority = "HIGHEST"

    def __init__(self, marks: Marks) -> None:
        self.marks = marks

    def after_train_epoch(self, runner: FlexibleRunner) -> None:
        self.marks.update = 0


class ReadsTheLoss(Hook):
    """What must not be done: a look at the loss at every update."""

    def after_train_iter(
        self, runner: FlexibleRunner, batch_idx: int, data_batch: Any = None, outputs: Mapping[str, Any] | None = None
    ) -> None:
        assert outputs is not None
        outputs["loss"].item()


class PartlyFrozen(Classifier):
    """Some of the parameters that the optimizer gets are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.features.requires_grad_(False)


class Counts(Classifier):
    """Says how many items of a batch count; a mask of the batch says which."""

    def forward(self, images: Tensor, labels: Tensor, mode: str = "loss") -> Any:
        logits = self.head(self.features(images))
        counted = labels != 3
        losses = functional.cross_entropy(logits, labels, reduction="none") * counted
        return {"loss": losses.sum() / counted.sum()}

    def loss_weight(self, data_batch: Any) -> Tensor:
        return (data_batch[1] != 3).sum()


class OwnStep(Classifier):
    """MMEngine's train_step."""

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        with optim_wrapper.optim_context(self):
            losses = self(*data, mode="loss")
        optim_wrapper.update_params(losses["loss"])
        return losses


class Values(Classifier):
    """Gives more to log than its loss."""

    def forward(self, images: Tensor, labels: Tensor, mode: str = "loss") -> Any:
        logits = self.head(self.features(images))
        right = (logits.argmax(1) == labels).float().mean()
        return {"loss": functional.cross_entropy(logits, labels), "right": right, "rows": torch.tensor(len(labels))}


class Taught(Classifier):
    """With an average of a part of it beside that."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.head).requires_grad_(False)


def waits(folder: Path, strategy: Mapping[str, Any], **changes: Any) -> dict[int, list[str]]:
    """For each update, what made the host wait for the device: the kind, and the line of the library that did it."""
    import torch_npu

    marks = Marks()
    hooks = [*changes.pop("custom_hooks", []), marks, EndsEpoch(marks)]
    seen: dict[int, list[str]] = {}

    def note(what: str) -> None:
        own = [frame for frame in traceback.extract_stack() if "torch/" not in frame.filename][:-1]
        place = f"{Path(own[-1].filename).name}:{own[-1].lineno} {own[-1].line}" if own else "?"
        seen.setdefault(marks.update, []).append(f"{what} at {place}")

    defaults = dict(logger=dict(interval=INTERVAL))
    runner = make_runner(
        folder, strategy, int(os.environ["WORLD_SIZE"]), custom_hooks=hooks, default_hooks=defaults, **changes
    )
    torch_npu.watch(note)
    try:
        runner.train()
    finally:
        torch_npu.watch(None)
        runner.strategy.leave()
    return {update: found for update, found in seen.items() if update}


NPU, FSDP = dict(type="NPUStrategy"), dict(type="FSDPStrategy", device="npu", wrap=["Sequential"])
RECIPES: dict[str, dict[str, Any]] = {
    "plain": dict(optim_wrapper=dict(optimizer=ADAMW)),
    "clipped": dict(optim_wrapper=dict(optimizer=ADAMW, clip_grad=dict(max_norm=0.5))),
    "accumulated": dict(optim_wrapper=dict(optimizer=ADAMW, accumulative_counts=2)),
    "bfloat16": dict(optim_wrapper=dict(type="AmpOptimWrapper", dtype="bfloat16", optimizer=ADAMW)),
    "partly frozen": dict(model=PartlyFrozen),
    "averaged and scheduled": dict(custom_hooks=[dict(type="EMAHook")], param_scheduler=dict(type="LinearLR")),
    "weighted": dict(model=Counts, optim_wrapper=dict(optimizer=ADAMW, accumulative_counts=2)),
    "own step": dict(model=OwnStep, optim_wrapper=dict(optimizer=ADAMW, accumulative_counts=2)),
    "values": dict(model=Values, optim_wrapper=dict(optimizer=ADAMW, accumulative_counts=2)),
    "clipped by value": dict(optim_wrapper=dict(optimizer=ADAMW, clip_grad=dict(type="value", clip_value=0.1))),
    "taught": dict(
        model=Taught, custom_hooks=[dict(type="TeacherHook", student="head", teacher="teacher", momentum=0.01)]
    ),
}


def between_lines(found: Mapping[int, list[str]]) -> dict[int, list[str]]:
    return {update: waits for update, waits in found.items() if update % INTERVAL}


@pytest.mark.parametrize("recipe", RECIPES)
def test_nothing_waits_in_one_process(npu1: Any, tmp_path: Path, recipe: str) -> None:
    (found,) = npu1.run(waits, tmp_path, NPU, **RECIPES[recipe])
    assert not between_lines(found)
    assert found[INTERVAL]  # the line's own figures come from the device


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("strategy", [pytest.param(NPU, id="npu"), pytest.param(FSDP, id="fsdp")])
def test_nothing_waits_in_two_processes(npu2: Any, tmp_path: Path, strategy: Any, recipe: str) -> None:
    for found in npu2.run(waits, tmp_path, strategy, **RECIPES[recipe]):
        between = between_lines(found)
        if strategy is NPU:
            # Once in its life torch's DDP has rank 0 say which gradients travel together: in the second forward, in C++.
            once = between.pop(2, [])
            assert len(once) == (0 if recipe == "own step" else 2), once  # a model's own train_step calls no DDP
            assert all(
                "copy to host at base_model.py" in wait or "copy to host at collectives.py" in wait for wait in once
            )
        else:
            # The first forward is watched for writes to parameters, which FSDP would lose: one look for each unit. That all
            # processes leave out the same parameters is read once.
            once = between.pop(1)
            assert all(" at strategy.py" in wait or " at lost_writes.py" in wait for wait in once), once
        assert not between
        assert found[INTERVAL]


def test_float16_asks_once_per_update_whether_to_make_it(npu1: Any, tmp_path: Path) -> None:
    amp = dict(type="AmpOptimWrapper", dtype="float16", optimizer=ADAMW, clip_grad=dict(max_norm=0.5))
    (found,) = npu1.run(waits, tmp_path, NPU, optim_wrapper=amp)
    others = {
        update: waits for update, waits in between_lines(found).items() if update > 1
    }  # the scale is made at first
    assert {len(waits) for waits in others.values()} == {1}
    assert all("torch_private.py" in waits[0] for waits in others.values())  # where GradScaler reads it


def test_a_hook_that_reads_the_loss_is_found(npu1: Any, tmp_path: Path) -> None:
    (found,) = npu1.run(waits, tmp_path, NPU, custom_hooks=[ReadsTheLoss()])
    assert len(between_lines(found)) == 12
    assert "item at test_traffic.py:" in found[1][0]
