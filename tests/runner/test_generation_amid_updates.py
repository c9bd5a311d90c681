"""Generating between the micro-batches of an update, beside a teacher, and in half precision: training goes on the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flextrain import FlexibleRunner, Hook
from flextrain.testing import WorkerGroup
from tests.runner.test_generation_with_buffers import TOKENS, Walker, Walks

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("quick")]
FULL = pytest.mark.full
DDP = dict(type="DDPStrategy")
FSDP = dict(type="FSDPStrategy", wrap="blocks")
ZERO2 = dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=2))
ZERO3 = dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=3, stage3_param_persistence_threshold=0))


class Plain(Walker):
    """Without batch normalisation in training mode, so that one device computes the same."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.norm = nn.LayerNorm(6)  # type: ignore[union-attr,assignment]


class Interrupted(Plain):
    """Generates between micro-batches, in its own train_step."""

    runner: Any = None
    texts: list[Any] = []

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = nn.Parameter(
            self.head.weight.detach().clone()
        )  # the parts that train_step calls share nothing

    def train_step(self, data: Any, optim_wrapper: Any) -> Any:
        with optim_wrapper.optim_context(self):
            loss = self(**data)["loss"]
        if self.runner is not None:
            self.texts.append(texts(self.runner))
        optim_wrapper.update_params(loss)
        if self.runner is not None:
            self.texts.append(texts(self.runner))
        return {"loss": loss}


class Follows(nn.Module):
    """A student and its teacher; the teacher generates."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = Plain(), Plain()
        self.teacher.requires_grad_(False)

    def forward(self, ids: Tensor, mode: str = "loss") -> Any:
        with torch.no_grad():
            wanted = self.teacher(ids, mode="tensor")
        found = self.student(ids)
        found["loss"] = found["loss"] + (self.student(ids, mode="tensor") - wanted).square().mean()
        return found

    def generate(self, ids: Tensor, **options: Any) -> Tensor:
        return torch.cat([self.teacher.generate(ids, **options), self.student.generate(ids, **options)], 1)


def texts(runner: FlexibleRunner) -> Any:
    ids = torch.arange(TOKENS)[: 3 + runner.rank, None]
    return runner.generate(ids, max_new_tokens=5 + runner.rank)[:3, :6].tolist()


class Watches(Hook):
    def __init__(self, asks: bool) -> None:
        self.asks, self.losses, self.texts = asks, list[float](), list[Any]()

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if self.asks:
            self.texts.append(texts(runner))

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Mapping[str, Any] | None = None
    ) -> None:
        assert outputs is not None
        self.losses.append(float(runner.strategy.topology.data.mean(outputs["loss"].clone())))


def trains(folder: str, strategy: dict[str, Any], kind: str, asks: bool) -> Any:
    hook = Watches(asks)
    hooks: list[Any] = [hook]
    wrapper: dict[str, Any] = dict(optimizer=dict(type="AdamW", lr=0.02), accumulative_counts=3)
    model: Callable[[], nn.Module] = Plain
    if kind == "teacher":
        model = Follows
        hooks.append(dict(type="TeacherHook", student="student", teacher="teacher", momentum=0.2))
    if kind == "interrupted":
        model = Interrupted
    if kind == "bf16":
        wrapper |= dict(type="AmpOptimWrapper", dtype="bfloat16")
    runner = FlexibleRunner(
        model=model,
        work_dir=f"{folder}/{asks}",
        strategy=strategy,
        train_dataloader=dict(batch_size=2, dataset=Walks(48), collate_fn="default_collate"),
        optim_wrapper=wrapper,
        train_cfg=dict(by_epoch=False, max_iters=4),
        custom_hooks=hooks,
        randomness=dict(seed=0),
        default_hooks=dict(checkpoint=None),
    )
    Interrupted.runner, Interrupted.texts = runner if asks else None, []
    try:
        runner.train()
    finally:
        Interrupted.runner = None
    weights = {name: plain(p).clone() for name, p in runner.strategy.parameters()}
    runner.close()
    return hook.losses, weights, hook.texts, Interrupted.texts


def plain(tensor: Any) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["interrupted", pytest.param("teacher", marks=FULL), pytest.param("bf16", marks=FULL)])
@pytest.mark.parametrize(
    "strategy",
    [FSDP, *(pytest.param(s, marks=FULL) for s in (DDP, ZERO2, ZERO3))],
    ids=["fsdp", "ddp", "zero2", "zero3"],
)
def test_training_goes_on_the_same(workers2: WorkerGroup, tmp_path: Path, strategy: dict[str, Any], kind: str) -> None:
    if kind == "interrupted" and strategy in (ZERO2, ZERO3):
        pytest.skip("DeepSpeed's engine trains no model with a train_step of its own")
    asked = workers2.run(trains, str(tmp_path), strategy, kind, True)
    undisturbed = workers2.run(trains, str(tmp_path), strategy, kind, False)
    for found, other in zip(asked, undisturbed, strict=True):
        assert found[0] == other[0]
        for name, weight in other[1].items():
            assert torch.equal(found[1][name], weight), name
    assert asked[0][2:] == asked[1][2:]
    written = asked[0][3] if kind == "interrupted" else asked[0][2]
    assert written[0] != written[-1]
