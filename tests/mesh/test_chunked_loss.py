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

from flextrain import ConfigError, SingleDeviceStrategy, StrategyError
from flextrain.core.model import logits
from flextrain.core.model.token_counts import count_tokens
from flextrain.core.torch_compat.torch_private import TorchDispatchMode
from flextrain.runner.transforms.chunked_loss import ChunkedLoss
from flextrain.testing import WorkerGroup
from flextrain.testing.differences import same_numbers, same_tensors
from flextrain.testing.loop import alone

from . import test_divided_logits
from .attention_models import CONFIGS, build
from .parity import dtype_of
from .test_divided_logits import InFloat64, made, trained

FSDP = dict(type="FSDPStrategy")
MESH = dict(type="MeshStrategy")
STRATEGIES: dict[str, dict[str, Any]] = {
    "one": dict(type="SingleDeviceStrategy"),
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


def language_model(family: str, **options: Any) -> nn.Module:
    """A model by its name in ``attention_models``, or else of ``test_divided_logits``."""
    if family not in CONFIGS:
        return made(family, **options)  # type: ignore[no-any-return]
    torch.manual_seed(7)
    model = build(family, **options)
    count_tokens(model)
    return model


def chunked(family: str, chunk: int = 7, z_loss: float = 0.0, **options: Any) -> nn.Module:
    model = language_model(family, **options)
    ChunkedLoss(chunk, z_loss=z_loss)(model)
    return model


def compare(spec: Mapping[str, Any], family: str, options: Mapping[str, Any]) -> None:
    """In a worker: train on one device with whole logits, and under a strategy by rows."""
    single = spec["type"] == "DeepSpeedStrategy"  # trains in float32
    within = (1e-5 if single else 1e-12) * (10 if single else 1000) ** (family in CONFIGS)  # whose weights are large
    losses = nullcontext if single else InFloat64
    with dtype_of(torch.float32 if single else torch.float64), patch.object(test_divided_logits, "InFloat64", losses):
        # In float32 the large scores of T5 make a difference of one rounding 1e-3 in the third update, on one device too.
        is_rough = single and family == "t5"
        with nullcontext() if is_rough else alone():
            whole = functools.partial(language_model, family, **options)
            expected, weights = trained(spec if is_rough else dict(type=SingleDeviceStrategy), whole, 16)
        logits._told.clear()
        with alone() if spec["type"] == "SingleDeviceStrategy" else nullcontext():
            trace, found = trained(spec, functools.partial(chunked, family, **options), 16)
    assert not logits._told, logits._told
    same_numbers(trace.losses, expected.losses, "the loss", within)
    same_numbers(trace.grad_norms, expected.grad_norms, "the gradient norm", within)
    same_tensors(found, weights, "final weights", within)


def refusals(spec: Mapping[str, Any], family: str, options: Mapping[str, Any]) -> list[str]:
    """In a worker: what is said of a model with whole logits, and of one with logits by rows."""
    found = []
    for make in (language_model, chunked):
        try:
            with dtype_of(torch.float64):
                trained(spec, functools.partial(make, family, **options), 16)  # type: ignore[arg-type]
        except (ConfigError, StrategyError) as error:
            found.append(str(error))
    return found


NONE = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
BIOGPT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": dict(tie_word_embeddings=True),
    "gpt2": dict(NONE, num_key_value_heads=None, head_dim=None),  # tied
    "gemma2": {},  # soft-capped
    "gemma3": {},
    "granite": {},  # scaled
    "cohere": {},
    "phi": {},  # a head with a bias
    "mixtral": EXPERTS,
    "deepseek_v3": {},
    "gpt_oss": {},
    "bloom": {},
    "t5": dict(decoder_start_token_id=0),
    "bart": {},  # a bias of its own on the logits
}
CHAINS = "ForConditionalGeneration has several chains of layers"
REFUSED = {("pp2", family): CHAINS for family in ("t5", "bart")}
QUICK = {
    ("one", "bart"),
    ("fsdp", "llama"),
    ("zero3", "llama"),
    ("tp2", "gemma2"),
    ("tp2", "gpt2"),  # by a plan that is found, whose layers then give each other DTensors
    ("cp2", "t5"),
    ("cp2", "llama"),
    ("pp2", "llama"),
    ("fsdp head", "qwen3"),
}
VARIANTS = {"fsdp blocks", "fsdp head", "zero1", "tp2 sequence"}
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
    if name not in VARIANTS or family in ("llama", "qwen3", "gemma2", "granite", "cohere")
]


@pytest.mark.distributed
@pytest.mark.parametrize("name, family", CASES)
def test_trains_as_with_whole_logits(workers2: WorkerGroup, name: str, family: str) -> None:
    """Or is refused, as with whole logits."""
    if says := REFUSED.get((name, family)):
        for whole, by_rows in workers2.run(refusals, STRATEGIES[name], family, FAMILIES[family]):
            assert says in whole == by_rows
            assert "\n" not in by_rows
    else:
        workers2.run(compare, STRATEGIES[name], family, FAMILIES[family])


@pytest.mark.distributed
def test_local_tensors_of_a_plan_are_refused(workers2: WorkerGroup) -> None:
    says = 'strategy.tp_kind: "local" is not possible, choose "dtensor": ChunkedLoss computes lm_head after its forward'
    found = workers2.run(refusals, dict(MESH, tp=2, tp_kind="local"), "gpt2", FAMILIES["gpt2"])
    assert [each[-1] for each in found] == [says, says]


@pytest.mark.distributed
@pytest.mark.parametrize(
    "kind, family",
    [
        ("local", "biogpt"),
        ("auto", "gpt2"),  # which only DTensors can train
        *(pytest.param(*each, marks=pytest.mark.full) for each in (("auto", "biogpt"), ("dtensor", "biogpt"))),
    ],
)
def test_a_head_that_tp_does_not_divide(workers2: WorkerGroup, kind: str, family: str) -> None:
    """Beside a plan that is found; layers that give each other ordinary tensors are compared with DTensors at first."""
    options = {**{"gpt2": FAMILIES["gpt2"], "biogpt": BIOGPT}[family], "vocab_size": 65}
    workers2.run(compare, dict(MESH, tp=2, tp_kind=kind), family, options)


def compare_z_loss(spec: Mapping[str, Any], family: str) -> None:
    """In a worker: train with a z-loss on one device, where it is that of whole logits, and under a strategy."""
    single = spec["type"] == "DeepSpeedStrategy"
    within = 1e-5 if single else 1e-12
    losses = nullcontext if single else InFloat64
    model = functools.partial(chunked, family, z_loss=0.1)
    with dtype_of(torch.float32 if single else torch.float64), patch.object(test_divided_logits, "InFloat64", losses):
        with alone():
            expected, weights = trained(dict(type=SingleDeviceStrategy), model, 16)
        trace, found = trained(spec, model, 16)
    same_numbers(trace.losses, expected.losses, "the loss", within)
    same_numbers(trace.grad_norms, expected.grad_norms, "the gradient norm", within)
    same_tensors(found, weights, "final weights", within)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=[
                *([] if name in ("tp2", "cp2") else [pytest.mark.full]),
                *([pytest.mark.deepspeed] if name.startswith("zero") else []),
            ],
        )
        for name in STRATEGIES
        if name != "one"
    ],
)
def test_a_z_loss_counts_the_same_tokens(workers2: WorkerGroup, name: str) -> None:
    workers2.run(compare_z_loss, STRATEGIES[name], "llama")


class Gatherings(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the collectives that gather."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "allgather" in str(operation).replace("_", "")
        return operation(*args, **(kwargs or {}))


def gatherings(spec: Mapping[str, Any]) -> list[int]:
    """In a worker: collectives that gather, with all tokens in one chunk and with ten chunks."""
    found = []
    for chunk in (1000, 7):
        with patch.object(test_divided_logits, "InFloat64", nullcontext), Gatherings() as counted:
            trained(spec, functools.partial(chunked, "llama", chunk), 16)
        found.append(counted.count)
    return found


@pytest.mark.distributed
@pytest.mark.parametrize(
    "name", ["fsdp blocks", pytest.param("zero3", marks=[pytest.mark.full, pytest.mark.deepspeed])]
)
def test_chunks_gather_the_head_no_more_often(workers2: WorkerGroup, name: str) -> None:
    for whole, by_chunks in workers2.run(gatherings, STRATEGIES[name]):
        assert by_chunks == whole > 0
