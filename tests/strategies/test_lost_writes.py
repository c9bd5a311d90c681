"""A forward that writes to parameters: refused, since the write would be lost, or would make processes differ."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flextrain import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, MeshStrategy, OptimWrapper
from flextrain.core.base.errors import StrategyError
from flextrain.core.comm import collectives as dist
from flextrain.testing import WorkerGroup
from flextrain.testing.loop import train

pytestmark = pytest.mark.distributed


class Follows(nn.Module):
    """A second network follows the first one, or a scalar and a buffer count."""

    steps: Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.table = nn.Embedding(6, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.target = copy.deepcopy(self.blocks[0]).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(()), requires_grad=False)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        if self.kind == "data":
            for own, other in zip(self.target.parameters(), self.blocks[0].parameters(), strict=True):
                own.data = own.data * 0.9 + other.detach().mean() * 0.1
        if self.kind == "another order":
            with torch.no_grad():
                self.target.weight.copy_(self.target.weight.flip(0, 1))
        if self.kind == "in place":
            with torch.no_grad():
                self.target.weight.mul_(0.9)
        with torch.no_grad():
            self.steps += 1
            self.scale += 1
        hidden = self.table(x)
        for block in self.blocks:
            hidden = block(hidden)
        return {"loss": (hidden - self.target(hidden).detach()).pow(2).mean()}


WRITES = {
    "data": "target.weight",
    "in place": "target.weight",
    "another order": "target.weight",
    "none": "",
}


def raised() -> dict[str, str]:
    """In a worker: what is raised for each model, in its second update too."""
    found = {}
    for kind in WRITES:
        strategy: Any = FSDPStrategy(device="cpu", wrap=["Linear"] if kind == "none" else None)
        strategy.join()
        torch.manual_seed(0)
        model, optim = strategy.setup(Follows(kind), OptimWrapper(dict(type="SGD", lr=0.1)))
        found[kind] = ""
        try:
            train(strategy, model, optim, [[dict(x=torch.arange(6))]] * 2)  # type: ignore[arg-type]
            hooks = [len(part._forward_hooks) for part in model.modules()]
            assert max(hooks) < 3, hooks
        except StrategyError as error:
            found[kind] = str(error)
        strategy.leave()
        dist.destroy_process_group()
    return found


def test_writes_in_forward(workers1: WorkerGroup) -> None:
    (found,) = workers1.run(raised)
    expected = {
        kind: f"model.{name}: forward writes to it, which would be lost, since FSDP" if name else ""
        for kind, name in WRITES.items()
    }
    assert {kind: text[: len(expected[kind])] for kind, text in found.items()} == expected
    assert not found["none"]


class Bounded(nn.Module):
    """A table whose rows are far from their bound at first."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(6, 4, max_norm=1000.0)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.table(x).mean()}


BOUNDED: dict[str, tuple[type, dict[str, Any]]] = {
    "ddp": (DDPStrategy, {}),
    "fsdp": (FSDPStrategy, {}),
    "mesh": (MeshStrategy, dict(dp_shard=2)),
    "zero1": (DeepSpeedStrategy, dict(zero_optimization=dict(stage=1))),
    "zero3": (DeepSpeedStrategy, dict(zero_optimization=dict(stage=3))),
}


def bounded(kind: str) -> str:
    """In a worker: what a strategy says at set-up of a table that keeps its norms."""
    make, options = BOUNDED[kind]
    strategy: Any = make(device="cpu", **options)
    strategy.join()
    try:
        strategy.setup(Bounded(), OptimWrapper(dict(type="SGD", lr=0.1)))
    except StrategyError as error:
        return str(error)
    finally:
        strategy.leave()
    return ""


@pytest.mark.parametrize("kind", BOUNDED)
def test_a_table_that_keeps_its_norms(workers2: WorkerGroup, kind: str) -> None:
    found = workers2.run(bounded, kind)
    assert [text.partition(", by")[0] for text in found] == ["model.table: has max_norm=1000.0"] * 2
