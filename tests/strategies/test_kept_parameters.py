"""Models that keep their parameters beside the modules that have them: under strategies that replace these, nothing stale is used."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from flextrain import OptimWrapper
from flextrain.core.base.errors import StrategyError
from flextrain.core.base.registry import STRATEGIES
from flextrain.runner.loops.step import Stepper
from flextrain.strategies.sharding import check_apart
from flextrain.testing import WorkerGroup

from ..mesh.parity import NEEDS_LAYOUTS

pytestmark = pytest.mark.distributed

PLAN = {"up": "colwise", "down": "rowwise"}
FSDP: dict[str, Any] = dict(type="FSDPStrategy")
THAT_REPLACE = [
    pytest.param(FSDP, id="fsdp"),
    pytest.param(dict(type="MeshStrategy", tp=2, plan=PLAN, tp_kind="dtensor"), id="dtensor", marks=NEEDS_LAYOUTS),
    pytest.param(dict(type="MeshStrategy", tp=2, plan=PLAN, tp_kind="local"), id="local", marks=NEEDS_LAYOUTS),
]


class Keeping(nn.Module):
    """Adds the squares of what it keeps of its weights to its loss."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.way, weight = way, self.up.weight
        if way == "list":
            self.kept: Any = [weight]
        elif way == "dict":
            self.kept = dict(self.named_parameters())
        elif way == "closure":
            self.kept = lambda: weight
        elif way == "detached":
            self.kept = (weight.detach(),)
        elif way == "buffer":
            self.register_buffer("kept", weight.data.t())
        elif way == "unused":
            self.unused = [weight]
        elif way == "copies":
            self.kept = [weight.detach().clone()]

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        out = self.down(functional.gelu(self.up(x)))
        kept = [self.kept()] if self.way == "closure" else getattr(self, "kept", ())
        values = kept.values() if isinstance(kept, dict) else [kept] if isinstance(kept, Tensor) else kept
        return {"loss": sum((each.square().sum() for each in values), out.square().mean())}


def evaluated(spec: dict[str, Any]) -> list[float]:
    """In a worker: what the model computes without gradients, before and after it is set up."""
    strategy = STRATEGIES.build(dict(spec, device="cpu", timeout_s=60), "strategy")
    try:
        strategy.join()
        model, x = Keeping("list"), {"x": torch.zeros(2, 4)}
        with torch.no_grad():
            before = model(**x)["loss"].item()
            called, _ = strategy.setup(model)
            return [before, called(**x)["loss"].item()]
    finally:
        strategy.leave()


def trained(spec: dict[str, Any], way: str) -> str:
    """In a worker: the message of the error that the second update ends with, or "trained"."""
    torch.manual_seed(0)
    strategy = STRATEGIES.build(dict(spec, device="cpu", timeout_s=60), "strategy")
    try:
        strategy.join()
        model, optim = strategy.setup(Keeping(way), OptimWrapper(dict(type="SGD", lr=0.1)))
        stepper = Stepper(strategy, model, optim)
        for seed in range(2):
            stepper.train([{"x": torch.full((2, 4), float(seed + int(os.environ["RANK"])))}])
    except StrategyError as error:
        return str(error)
    finally:
        strategy.leave()
    return "trained"


@pytest.mark.parametrize("spec", THAT_REPLACE)
@pytest.mark.parametrize("way", ["list", "dict", "closure"])
def test_gradients_of_a_parameter_that_was_replaced(workers2: WorkerGroup, spec: dict[str, Any], way: str) -> None:
    for found in workers2.run(trained, spec, way):
        assert "forward computes with the parameter that" in found
        assert "read it in forward from the module" in found


@pytest.mark.parametrize("spec", THAT_REPLACE[:2])
def test_values_of_a_parameter_that_was_replaced(workers2: WorkerGroup, spec: dict[str, Any]) -> None:
    for before, after in workers2.run(evaluated, spec):
        assert math.isfinite(before)
        assert math.isnan(after)


@pytest.mark.parametrize("way", ["detached", "buffer"])
def test_memory_of_a_parameter_that_is_replaced(workers2: WorkerGroup, way: str) -> None:
    for spec in (FSDP, dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=2))):
        for found in workers2.run(trained, spec, way):
            assert found.startswith("model.kept: is another tensor than model.up.weight in the same memory")


@pytest.mark.parametrize("way", ["unused", "copies"])
def test_what_does_no_harm(workers2: WorkerGroup, way: str) -> None:
    assert workers2.run(trained, FSDP, way) == ["trained", "trained"]


def test_tensors_that_are_computed_from_parameters() -> None:
    """Torch's older spectral_norm keeps a tensor in the memory of its weight, and computes it anew in every forward."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    nn.utils.spectral_norm(model[1])
    check_apart(model, "FSDPStrategy")
