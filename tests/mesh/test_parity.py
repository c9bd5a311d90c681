"""Every mesh makes the training run that one device makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flextrain.testing import WorkerGroup

from .parity import RECIPES, compare

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
