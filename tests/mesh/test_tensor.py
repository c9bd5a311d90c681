"""Tensor parallelism by a plan: whatever the plan says, and however a model is written, training is that of one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flextrain.testing import WorkerGroup

from . import tensor_models as own
from .parity import RECIPES, Recipe, compare

pytestmark = pytest.mark.distributed

SEPARATE = {
    "layers.*.[qkv]": "colwise",
    "layers.*.out": "rowwise",
    "layers.*.up": "colwise",
    "layers.*.down": "rowwise",
}
VOCABULARY = {"embed": "embedding_rowwise", "head": "colwise"}
JOINED = {"layers.*.qkv": "packed_colwise:3", "layers.*.out": "rowwise", "layers.*.mlp.0": "colwise"}
FUSED = {**JOINED, "layers.*.mlp.2": "rowwise"}
CHUNKED = {**JOINED, "layers.*.mlp.3": "rowwise"}
CONTIGUOUS = {"layers.*.qkv": "colwise"}  # cuts queries, keys and values in the wrong places: gathered
GPT2 = {
    "transformer.h.*.attn.c_attn": "packed_colwise:3", "transformer.h.*.attn.c_proj": "rowwise",
    "transformer.h.*.mlp.c_fc": "colwise", "transformer.h.*.mlp.c_proj": "rowwise", "transformer.wte": "embedding_rowwise",
}  # fmt: skip
LLAMA = {
    "model.layers.*.[qkv]_proj": "colwise", "model.layers.*.gate_proj": "colwise", "model.layers.*.up_proj": "colwise",
    "model.layers.*.[od]*_proj": "rowwise",
}  # fmt: skip
VISION = {
    "net.encoder.layers.*.self_attention": "packed_colwise:3", "net.encoder.layers.*.out_proj": "rowwise",
    "net.encoder.layers.*.mlp.0": "colwise", "net.encoder.layers.*.mlp.3": "rowwise",
}  # fmt: skip
ATTENDING = {
    "cross": "packed_colwise:3", "layer.self_attn": "packed_colwise:3", "*.out_proj": "rowwise",
    "layer.linear1": "colwise", "layer.linear2": "rowwise", "head": "colwise",
}  # fmt: skip
ODD = {"embed": "rowwise", "up": "colwise", "gate": "colwise", "down": "rowwise", "head": "colwise"}

# Biases of keys have no gradient but rounding noise, which Adam would scale to full steps.
SGD = Recipe(optimizer="SGD", lr=0.1, accumulate=2)
ADAMW = RECIPES["accumulate-clip"]
QUICK: list[Any] = [
    ("fused", FUSED, ADAMW, {}),
    ("plain_tied", {**SEPARATE, **VOCABULARY}, ADAMW, dict(sequence_parallel=True)),
    ("odd", ODD, ADAMW, {}),
]
FULL: list[Any] = [
    ("plain", {**SEPARATE, **VOCABULARY}, RECIPES["frozen"], {}),
    ("fused", {**FUSED, **CONTIGUOUS}, ADAMW, {}),
    ("chunked", CHUNKED, ADAMW, {}),
    ("chunked", {**CHUNKED, **CONTIGUOUS}, ADAMW, {}),
    ("split", CHUNKED, ADAMW, {}),
    ("gpt2", GPT2, ADAMW, {}),
    ("gpt2", {**GPT2, "transformer.h.*.attn.c_attn": "colwise"}, ADAMW, {}),
    ("llama", LLAMA, ADAMW, {}),
    ("llama", LLAMA, ADAMW, dict(sequence_parallel=True)),
    ("llama_tied", {**LLAMA, "model.embed_tokens": "embedding_rowwise"}, ADAMW, {}),
    ("vision", VISION, SGD, {}),
    ("attending", ATTENDING, SGD, {}),
    ("attending", {**ATTENDING, "cross": "colwise", "layer.self_attn": "colwise"}, SGD, {}),
    ("attending", {**ATTENDING, "layer.norm*": "sequence"}, SGD, dict(sequence_parallel=True)),
]


def parity(*given: Any, **options: Any) -> Any:
    """In a worker, where this module registers its models: see ``compare``."""
    assert own.MODELS["odd"]
    return compare(*given, **options)


def _cases(world_size: int, cases: list[Any], *marks: Any) -> list[Any]:
    counts: dict[str, int] = {}
    found = []
    for model, *rest in cases:
        counts[model] = counts.get(model, 0) + 1
        found.append(pytest.param(world_size, model, *rest, id=f"{world_size}-{model}-{counts[model]}", marks=marks))
    return found


@pytest.mark.parametrize(
    "world_size, model, plan, recipe, options",
    [
        *_cases(2, QUICK),
        *_cases(2, FULL, pytest.mark.full),
        *_cases(3, QUICK[2:], pytest.mark.full),
        *_cases(4, [*QUICK, *FULL], pytest.mark.full),
    ],
)
def test_trains_as_one_device(
    workers: Callable[[int], WorkerGroup],
    world_size: int,
    model: str,
    plan: dict[str, str],
    recipe: Recipe,
    options: dict[str, Any],
) -> None:
    spec = dict(type="MeshStrategy", tp=3 if world_size == 3 else 2, plan=plan, **options)
    wrap = dict(wrap="blocks") if world_size == 4 and model not in ("odd", "attending") else {}
    traces = workers(world_size).run(parity, {**spec, **wrap}, model, recipe)
    assert all(trace == traces[0] for trace in traces)
    assert sum(traces[0].losses[-5:]) < sum(traces[0].losses[:5])
