"""Models that keep their parameters beside the modules that have them: under strategies that replace these, nothing stale is used."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from flextrain import OptimWrapper
from flextrain.core.base.errors import StrategyError
from flextrain.core.base.registry import STRATEGIES
from flextrain.core.torch_compat.torch_private import foreach_mul_
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


USES: dict[str, Callable[[nn.Parameter], Any]] = {
    "data": lambda kept: kept.data.clamp_(-0.1, 0.1),
    "mul_": lambda kept: kept.mul_(0.9),
    "copy_": lambda kept: torch.zeros(8, 4).copy_(kept),
    "_foreach_mul_": lambda kept: foreach_mul_([kept], 0.9),
    "normal_": lambda kept: nn.init.normal_(kept),
    "requires_grad_": lambda kept: kept.requires_grad_(False),
    "requires_grad": lambda kept: setattr(kept, "requires_grad", False),
    "grad": lambda kept: kept.grad,
    "linear": lambda kept: functional.linear(torch.zeros(2, 4), kept),
}
HARMLESS: list[Callable[[nn.Parameter], Any]] = [
    lambda kept: kept.shape,
    lambda kept: kept.numel(),
    lambda kept: kept.requires_grad,
    repr,
    hash,
    lambda kept: copy.deepcopy([kept]),
]


@torch.no_grad()
def used(spec: dict[str, Any], frozen: bool) -> tuple[dict[str, str], bool]:
    """In a worker: the messages of what was done with a parameter that was replaced, and whether its values are NaN."""
    strategy = STRATEGIES.build(dict(spec, device="cpu", timeout_s=60), "strategy")
    try:
        strategy.join()
        model, found = Keeping("none"), {}
        kept = model.up.weight.requires_grad_(not frozen)
        memory = kept.data
        strategy.setup(model)
        for name, use in USES.items():
            try:
                use(kept)
            except StrategyError as error:
                found[name] = str(error)
        for use in HARMLESS:
            use(kept)
        return found, bool(memory.isnan().all())
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
        assert found.startswith("model.up.weight: ")
        assert "has kept since before set-up" in found


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("spec", THAT_REPLACE)
def test_uses_of_a_parameter_that_was_replaced(workers2: WorkerGroup, spec: dict[str, Any], frozen: bool) -> None:
    for found, is_nan in workers2.run(used, spec, frozen):
        assert {
            name: text.startswith(f"model.up.weight: {name} of the parameter that ") for name, text in found.items()
        } == dict.fromkeys(USES, True)
        assert is_nan is not frozen


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
