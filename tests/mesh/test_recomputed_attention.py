"""Recomputation under context parallelism: backward repeats attention as forward had it, and training is that of one device."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from flextrain import MeshStrategy
from flextrain.core.comm import collectives as dist
from flextrain.core.torch_compat.torch_private import repeating_in
from flextrain.strategies.mesh.context.context_parallel import Context
from flextrain.strategies.mesh.context.masks import Mask
from flextrain.testing import WorkerGroup
from flextrain.testing.loop import train
from flextrain.testing.sessions import whole_model

from ..device import DEVICE
from .attention_models import Exact, build
from .cutting import adamw, same_training
from .models import sample
from .parity import dtype_of
from .test_model_attention import BATCHES

pytestmark = pytest.mark.distributed
FULL = pytest.mark.full

LAYERS = {"gemma2": "Gemma2DecoderLayer", "gpt_oss": "GptOssDecoderLayer", "bloom": "BloomBlock"}
INNER = {"gemma2": "Gemma2Model", "gpt_oss": "GptOssModel", "bloom": "BloomModel"}
ATTENTION = {"gemma2": "Gemma2Attention", "gpt_oss": "GptOssAttention", "bloom": "BloomAttention"}


def option(kind: str, how: str) -> Any:
    """The option ``activation_checkpointing`` of a way to recompute."""
    classes = dict(layers=LAYERS, inner=INNER, attention=ATTENTION, both=LAYERS).get(how)
    return how if classes is None else dict(classes=[classes[kind]])


def switched(kind: str, how: str, **options: Any) -> nn.Module:
    """The model of a kind; with ``how="both"`` it recomputes its layers by transformers' own switch already."""
    model: Any = build(kind, **options)
    if how == "both":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
    return model  # type: ignore[no-any-return]


def trained(kind: str, change: str, how: str, options: Mapping[str, Any]) -> None:
    """In a worker: two updates on one device, and under a mesh with recomputation, in float64."""
    models = {kind: (functools.partial(switched, kind, how), BATCHES[change])}
    options = dict(options, activation_checkpointing=option(kind, how))
    with Exact(), repeating_in(lambda: (nullcontext(), Exact())):
        same_training(kind, options, models=models, updates=2, tolerance=1e-10)


def case(kind: str, change: str, how: str, cp_kind: str, *marks: Any) -> Any:
    return pytest.param(
        kind, change, how, dict(cp=2, cp_kind=cp_kind), id=f"{kind}-{change}-{how}-{cp_kind}", marks=marks
    )


DAILY = [
    ("gemma2", "packed", "both", "ring"),
    ("gpt_oss", "padded", "layers", "ulysses"),
    ("bloom", "padded", "model", "ring"),
]
REST = [
    (kind, change, how, cp_kind)
    for kind in LAYERS
    for change in ("padded", "packed")
    for how in ("layers", "inner", "attention", "model", "both", "matmuls")
    for cp_kind in ("ring", "ulysses")
    if change != "packed" or kind == "gemma2"  # the others do not keep documents apart on one device
]


@pytest.mark.parametrize(
    "kind, change, how, options",
    [*(case(*each) for each in DAILY), *(case(*each, FULL) for each in REST if each not in DAILY)],
)
def test_as_on_one_device(workers2: WorkerGroup, kind: str, change: str, how: str, options: dict[str, Any]) -> None:
    workers2.run(trained, kind, change, how, options)
