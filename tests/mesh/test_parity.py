"""Every mesh makes the training run that one device makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flextrain.testing import WorkerGroup
from flextrain.testing.differences import relative_difference, small_scales

from .parity import RECIPES, TOLERANCE, UPDATES, Recipe, compare, reference

pytestmark = pytest.mark.distributed

PLAN = {"layers.*.[qkv]": "colwise", "layers.*.out": "rowwise", "layers.*.up": "colwise", "layers.*.down": "rowwise"}
MESH = dict(type="MeshStrategy")
CASES: list[Any] = [
    pytest.param(2, dict(MESH), "convolutions", "accumulate-clip", id="dp2-convolutions"),
    pytest.param(2, dict(MESH, tp=2, plan=PLAN), "plain", "accumulate-clip", id="tp2-plain"),
    pytest.param(4, dict(MESH, tp=2, plan=PLAN, wrap="blocks"), "plain_tied", "frozen", id="dp2xtp2-plain_tied"),
]


@pytest.mark.parametrize("world_size, spec, model, recipe", CASES)
def test_parity(
    workers: Callable[[int], WorkerGroup], world_size: int, spec: dict[str, Any], model: str, recipe: str
) -> None:
    traces = workers(world_size).run(compare, spec, model, RECIPES[recipe])
    assert all(trace == traces[0] for trace in traces)
    assert sum(traces[0].losses[-5:]) < sum(traces[0].losses[:5])


FLOAT32: list[Any] = [
    pytest.param(2, dict(MESH, tp=2, plan=PLAN), "plain_tied", id="tp2-plain_tied"),
    pytest.param(2, dict(MESH, pp=2), "plain", id="pp2-plain"),
    *(
        pytest.param(world_size, MESH | spec, model, id=f"{name}-{model}", marks=pytest.mark.full)
        for world_size, name, spec, models in (
            (2, "dp2", {}, ("convolutions", "vision", "plain")),
            (2, "tp2", dict(tp=2), ("llama", "gpt2", "mixtral", "qwen3_moe")),
            (2, "pp2", dict(pp=2), ("llama_tied", "gpt2", "mixtral", "qwen3_moe")),
            (2, "cp2", dict(cp=2), ("plain", "llama", "gpt2", "mixtral")),
            (4, "dp2xtp2", dict(dp_shard=2, tp=2, plan=PLAN, wrap="blocks"), ("plain",)),
            (4, "pp2xtp2", dict(pp=2, tp=2, plan=PLAN), ("plain_tied",)),
            (4, "dp2xcp2", dict(cp=2), ("llama",)),
            (4, "dp2xep2xtp2", dict(ep=2, tp=2), ("mixtral",)),
        )
        for model in models
    ),
]  # fmt: skip


@pytest.mark.parametrize("world_size, spec, model", FLOAT32)
def test_parity_in_float32(
    workers: Callable[[int], WorkerGroup], world_size: int, spec: dict[str, Any], model: str
) -> None:
    workers(world_size).run(compare, spec, model, RECIPES["accumulate-clip"], torch.float32)


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
