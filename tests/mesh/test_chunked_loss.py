"""ChunkedLoss: models of transformers train as with whole logits, under every strategy, and no tensor has all logits."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from flextrain import SingleDeviceStrategy
from flextrain.core.model import logits
from flextrain.runner.transforms.chunked_loss import ChunkedLoss
from flextrain.testing import WorkerGroup
from flextrain.testing.differences import same_numbers, same_tensors
from flextrain.testing.loop import alone

from . import test_divided_logits
from .parity import dtype_of
from .test_divided_logits import InFloat64, made, trained

FSDP = dict(type="FSDPStrategy")
MESH = dict(type="MeshStrategy")
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": dict(type="DDPStrategy"),
    "fsdp": FSDP,
    "fsdp blocks": dict(FSDP, wrap="blocks"),
    "fsdp head": dict(FSDP, wrap=["Linear"]),
    "zero1": dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=1)),
    "zero3": dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=3)),
    "tp2": dict(MESH, tp=2),
    "tp2 sequence": dict(MESH, tp=2, sequence_parallel=True),
    "pp2": dict(MESH, pp=2),
    "cp2": dict(MESH, cp=2),
}


def chunked(family: str, **options: Any) -> nn.Module:
    model = made(family, **options)
    ChunkedLoss(7)(model)
    return model


def compare(spec: Mapping[str, Any], family: str, options: Mapping[str, Any]) -> None:
    """In a worker: train on one device with whole logits, and under a strategy by rows."""
    single = spec["type"] == "DeepSpeedStrategy"  # trains in float32
    within = 1e-5 if single else 1e-12
    losses = nullcontext if single else InFloat64
    with dtype_of(torch.float32 if single else torch.float64), patch.object(test_divided_logits, "InFloat64", losses):
        with alone():
            expected, weights = trained(dict(type=SingleDeviceStrategy), functools.partial(made, family, **options), 16)
        logits._told.clear()
        trace, found = trained(spec, functools.partial(chunked, family, **options), 16)
    assert not logits._told, logits._told
    same_numbers(trace.losses, expected.losses, "the loss", within)
    same_numbers(trace.grad_norms, expected.grad_norms, "the gradient norm", within)
    same_tensors(found, weights, "final weights", within)


FAMILIES = {"llama": {}, "qwen3": {"tie_word_embeddings": True}, "gemma2": {}, "granite": {}, "cohere": {}}
QUICK = {
    ("fsdp", "llama"),
    ("zero3", "llama"),
    ("tp2", "gemma2"),
    ("cp2", "llama"),
    ("pp2", "llama"),
    ("fsdp head", "qwen3"),
}
CASES = [
    pytest.param(
        name,
        family,
        id=f"{name}-{family}",
        marks=[
            *([] if (name, family) in QUICK else [pytest.mark.full]),
            *([pytest.mark.deepspeed] if name.startswith("zero") else []),
        ],
    )
    for name in STRATEGIES
    for family in FAMILIES
    if (name, family) not in {("cp2", "gemma2"), ("pp2", "qwen3")}  # soft-capped scores; tied weights of two stages
]


@pytest.mark.distributed
@pytest.mark.parametrize("name, family", CASES)
def test_trains_as_with_whole_logits(workers2: WorkerGroup, name: str, family: str) -> None:
    workers2.run(compare, STRATEGIES[name], family, FAMILIES[family])
