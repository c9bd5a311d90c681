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
from flextrain.testing.differences import same_tensors
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
    ("gpt_oss", "padded", "inner", "ulysses"),
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


# Dropout


def dropped(kind: str, how: str | None) -> tuple[list[float], Any]:
    """In a worker: the losses of two updates with dropout, and the weights after them."""
    torch.set_num_threads(1)
    options = dict(attention_dropout=0.5, **(dict(hidden_dropout=0.3) if kind == "bloom" else {}))
    with dtype_of(torch.float64):
        given = {} if how is None else dict(activation_checkpointing=option(kind, how))
        strategy = MeshStrategy(device=DEVICE, cp=2, cp_kind="ulysses", **given)
        strategy.join()
        torch.manual_seed(5)
        model, optim = strategy.setup(build(kind, **options), adamw(1))
        losses = train(strategy, model, optim, [[sample("llama", 4, seed)] for seed in range(2)]).losses  # type: ignore[arg-type]
        weights = whole_model(strategy)
        strategy.leave()
        dist.destroy_process_group()
    return losses, weights


def same_dropout(kind: str, how: str) -> None:
    """In a worker: train with and without recomputation."""
    (losses, weights), (expected, others) = dropped(kind, how), dropped(kind, None)
    assert losses == expected
    same_tensors(weights, others, "final weights", 0.0)


@pytest.mark.parametrize(
    "kind, how",
    [("bloom", "layers"), *(pytest.param(kind, "model", marks=FULL) for kind in ("bloom", "gemma2", "gpt_oss"))],
)
def test_the_same_drops_out_again(workers2: WorkerGroup, kind: str, how: str) -> None:
    workers2.run(same_dropout, kind, how)


# Masks


def made_masks(name: str, how: Any) -> tuple[int, bool]:
    """In a worker: how many tiles of masks a training has made, which is that of one device; whether some are left."""
    made, left = 0, True
    tile, run_window = Mask.tile, Context.run_window

    def counted(*given: Any) -> Any:
        nonlocal made
        made += 1
        return tile(*given)

    def watched(self: Context, *given: Any, **named: Any) -> Any:
        nonlocal left
        found = run_window(self, *given, **named)
        left = bool(self._attention.masks._made)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Mask, "tile", counted)
        patch.setattr(Context, "run_window", watched)
        same_training(name, dict(cp=2, activation_checkpointing=how))
    return made, left


@pytest.mark.parametrize(
    "how",
    [dict(classes=["LlamaModel"]), pytest.param(dict(classes=["LlamaDecoderLayer"]), marks=FULL)],
    ids=["model", "layers"],
)
def test_repetitions_have_the_masks_of_forward(workers2: WorkerGroup, how: Any) -> None:
    usual = workers2.run(made_masks, "padded", None)
    assert workers2.run(made_masks, "padded", how) == usual
    assert all(made and not left for made, left in usual)
