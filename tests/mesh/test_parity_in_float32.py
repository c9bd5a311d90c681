"""Parity in float32, and what rounding alone does there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flextrain.testing import WorkerGroup
from flextrain.testing.differences import relative_difference, small_scales

from ..conftest import WorkerFactory
from .parity import RECIPES, TOLERANCE, UPDATES, Recipe, compare, reference
from .test_parity import options_of, processes

pytestmark = pytest.mark.distributed

QUICK = {("tp2", "plain_tied"), ("pp2", "plain")}
MODELS = {
    "dp2": ("convolutions", "vision", "plain"),
    "replicate2xdp2": ("plain_tied",),
    "tp2": ("plain_tied", "llama", "gpt2", "mixtral", "qwen3_moe"),
    "pp2": ("plain", "llama_tied", "gpt2", "mixtral", "qwen3_moe"),
    "cp2": ("plain", "llama", "gpt2", "mixtral"),
    "ep2": ("qwen3_moe",),
    "dp2xtp2": ("plain", "llama_tied"),
    "pp2xtp2": ("plain_tied",),
    "dp2xcp2": ("llama",),
    "dp2xpp2": ("fused",),
    "dp2xtp2xep4": ("mixtral",),
    "dp2xpp2xtp2": ("plain",),
    "dp2xcp2xtp2": ("llama",),
}
CASES: list[Any] = [
    pytest.param(mesh, model, id=f"{mesh}-{model}", marks=() if (mesh, model) in QUICK else pytest.mark.full)
    for mesh, models in MODELS.items()
    for model in models
]


@pytest.mark.parametrize("mesh, model", CASES)
def test_parity_in_float32(workers: WorkerFactory, mesh: str, model: str) -> None:
    options = options_of(mesh, model)
    assert options is not None
    workers(processes(mesh)).run(compare, options, model, RECIPES["accumulate-clip"], torch.float32)


def worst(recipe: Recipe) -> float:
    """In a worker: how much the weights of one device differ from its own if samples of a batch are reversed, in float32."""
    torch.set_num_threads(1)
    _, weights = reference("plain", recipe, UPDATES, torch.float32)
    _, others = reference("plain", recipe, UPDATES, torch.float32, reverse=True)
    scales = small_scales(weights)
    return max(relative_difference(others[name], weights[name], scales[name]) for name in weights)


@pytest.mark.full
def test_what_rounding_does_to_one_device(workers1: WorkerGroup) -> None:
    """The tolerance of float32 is above it with the eps of ``parity``, and not with AdamW's own."""
    allowed = TOLERANCE[torch.float32]
    assert workers1.run(worst, Recipe(accumulate=2))[0] < allowed / 5
    assert workers1.run(worst, Recipe(accumulate=2, optimizer="SGD", lr=3e-2))[0] < allowed / 5
    assert workers1.run(worst, Recipe(accumulate=2, eps=1e-8))[0] > allowed
