"""Every mesh makes the training run that one device makes: each kind of model under each axis and each product of axes.

A few of the combinations are in the ordinary run, all of them have the marker ``full``.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from ..conftest import WorkerFactory
from .models import MATRICES, sample
from .parity import BATCH, RECIPES, compare

pytestmark = pytest.mark.distributed

MESHES: dict[str, dict[str, int]] = {
    "dp2": dict(dp_shard=2),
    "replicate2": dict(dp_replicate=2),
    "tp2": dict(tp=2),
    "cp2": dict(cp=2),
    "ep2": dict(dp_shard=2, ep=2),
    "pp2": dict(pp=2),
    "replicate2xdp2": dict(dp_replicate=2, dp_shard=2),
    "replicate2xtp2": dict(dp_replicate=2, tp=2),
    "dp2xtp2": dict(dp_shard=2, tp=2),
    "dp2xcp2": dict(dp_shard=2, cp=2),
    "dp4xep2": dict(dp_shard=4, ep=2),
    "dp2xpp2": dict(dp_shard=2, pp=2),
    "cp2xtp2": dict(cp=2, tp=2),
    "cp2xep2": dict(cp=2, ep=2),
    "tp2xep2": dict(tp=2, ep=2),
    "pp2xtp2": dict(pp=2, tp=2),
    "dp2xpp2xep2": dict(dp_shard=2, pp=2, ep=2),
    "dp2xpp2xtp2": dict(dp_shard=2, pp=2, tp=2),
    "dp2xcp2xtp2": dict(dp_shard=2, cp=2, tp=2),
    "dp2xtp2xep4": dict(dp_shard=2, tp=2, ep=4),
}
OF_MIXTURES = {f"layers.*.attention.{name.removeprefix('layers.*.')}": style for name, style in MATRICES.items()}
EXPERTS = {"layers.*.experts": "experts"}
LANGUAGE = ("plain", "plain_tied", "fused", "llama", "llama_tied", "gpt2", "mixture", "mixtral", "qwen3_moe")
MIXTURES = ("mixture", "mixtral", "qwen3_moe")
KEYS_WITH_BIAS = ("gpt2", "vision")
"""Their gradient is rounding noise, which Adam scales to steps: 1e-10 of the weights after 20 updates, under plain DDP as well."""
ROUTED_IN_FLOAT32 = 1e-6
"""Mixtral's router under its own plan computes in float32, also in a model of float64."""
QUICK = {("dp2", "convolutions"), ("tp2", "plain"), ("dp2xtp2", "plain_tied")}


def options_of(mesh: str, model: str) -> dict[str, Any] | None:
    """The options of a mesh for a model; None where the model has nothing that one of the axes divides."""
    sizes = MESHES[mesh]
    if "ep" in sizes and model not in MIXTURES:
        return None
    if "cp" in sizes and model not in LANGUAGE:
        return None
    if "tp" in sizes and model == "convolutions":
        return None
    options: dict[str, Any] = {"type": "MeshStrategy", **sizes}
    if model == "mixture":
        options["plan"] = (OF_MIXTURES if "tp" in sizes else {}) | (EXPERTS if "ep" in sizes else {}) or "auto"
    elif model in ("plain", "plain_tied") and "tp" in sizes:
        options["plan"] = MATRICES
    elif model in ("fused", "gpt2", "vision") and "tp" in sizes:
        options["plan_example"] = functools.partial(sample, model, BATCH, 0)  # the plan is found by tracing
    if sizes.get("dp_shard", 1) > 1 and model != "convolutions":
        options["wrap"] = "blocks"
    return options


def cases() -> Iterator[Any]:
    """Every mesh with every model that it divides; the recipes take turns."""
    recipes = itertools.cycle(("accumulate-clip", "frozen", "adamw"))
    for mesh, model in itertools.product(MESHES, (*LANGUAGE, "vision", "convolutions")):
        options = options_of(mesh, model)
        if options is not None:
            marks = () if (mesh, model) in QUICK else pytest.mark.full
            recipe = "sgd" if model in KEYS_WITH_BIAS else next(recipes)
            tolerance = ROUTED_IN_FLOAT32 if model == "mixtral" and "tp" in MESHES[mesh] else None
            yield pytest.param(mesh, options, model, recipe, tolerance, id=f"{mesh}-{model}", marks=marks)


def processes(mesh: str) -> int:
    size = 1
    for axis, number in MESHES[mesh].items():
        size *= 1 if axis == "ep" else number
    return max(size, 2)


@pytest.mark.parametrize("mesh, options, model, recipe, tolerance", list(cases()))
def test_parity(
    workers: WorkerFactory, mesh: str, options: dict[str, Any], model: str, recipe: str, tolerance: float | None
) -> None:
    traces = workers(processes(mesh)).run(compare, options, model, RECIPES[recipe], tolerance=tolerance)
    assert all(trace == traces[0] for trace in traces)
    assert sum(traces[0].losses[-5:]) < sum(traces[0].losses[:5])
