"""Attention that models have, under context parallelism: each trains as on one device, or is refused by the name of what it has."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from flextrain import MeshStrategy
from flextrain.core.base.errors import ConfigError, StrategyError
from flextrain.core.comm import collectives as dist
from flextrain.strategies.mesh.context.context_parallel import check_of_transformers
from flextrain.testing import WorkerGroup
from flextrain.testing.loop import train

from ..device import DEVICE
from .attention_models import CONFIGS, Exact, build
from .cutting import adamw, divided, packed, padded, same_training, uneven
from .models import Batch, sample
from .parity import dtype_of
from .test_encoder_decoder import KINDS

pytestmark = pytest.mark.distributed
FULL = pytest.mark.full

BATCHES: Mapping[str, Callable[[Batch, int], Batch]] = dict(
    uneven=uneven, padded=padded, packed=packed, divided=divided
)


def trained(kind: str, change: str, options: Mapping[str, Any]) -> None:
    """In a worker: two updates on one device and under a mesh, in float64: losses, gradient norms, weights, and outputs."""
    models = {kind: (functools.partial(build, kind), BATCHES[change])}
    with Exact():
        same_training(kind, options, models=models, updates=2, tolerance=1e-10)


def case(kind: str, change: str, *marks: Any, cp_kind: str = "auto", **options: Any) -> Any:
    layout = dict(cp=2, cp_kind=cp_kind, **options)
    world_size = layout["cp"] * layout.get("tp", 1)
    name = "-".join(
        [
            kind,
            change,
            cp_kind,
            *(f"{key}={value}" for key, value in options.items() if isinstance(value, (int, str))),
            *(key for key, value in options.items() if isinstance(value, dict)),
        ]
    )
    return pytest.param(world_size, kind, change, layout, id=name, marks=marks)


TOGETHER = ("mistral", "qwen2", "gemma3", "gemma2", "deepseek_v2", "deepseek_v3", "gpt_oss", "bloom")
"""Kinds that train under cp."""
DAILY = [
    case("gemma2", "padded", cp_kind="ring"),
    case("gemma2", "packed"),
    case("gpt_oss", "uneven"),
    case("gpt_oss", "padded", cp_kind="ring"),
    case("deepseek_v3", "packed", cp_kind="ring"),
    case("bloom", "padded"),
]
REST = [
    case(kind, change, FULL, cp_kind=cp_kind)
    for kind in TOGETHER
    for change in BATCHES
    for cp_kind in ("ring", "ulysses")
    if change != "packed" or kind not in ("gpt_oss", "bloom")  # which do not keep documents apart on one device
]
WITH_TENSORS = [
    *(case(kind, "padded", FULL, cp_kind="ulysses", tp=2) for kind in ("gemma2", "gemma3", "gpt_oss", "deepseek_v3")),
    case("gemma2", "packed", FULL, cp_kind="ring", tp=2),
    case("gpt_oss", "uneven", FULL, cp_kind="ring", tp=2),
]


IN_UNITS = [
    case("gpt_oss", "uneven", FULL, wrap="blocks"),
    case("bloom", "uneven", FULL, cp_kind="ring", wrap="blocks"),
    case("gpt_oss", "uneven", FULL, cp_kind="ring", compile=dict(backend="eager")),
    case("gemma2", "uneven", FULL, compile=dict(backend="eager")),
]


@pytest.mark.parametrize("world_size, kind, change, options", [*DAILY, *REST, *WITH_TENSORS, *IN_UNITS])
def test_as_on_one_device(
    workers: Callable[[int], WorkerGroup], world_size: int, kind: str, change: str, options: dict[str, Any]
) -> None:
    workers(world_size).run(trained, kind, change, options)


@FULL
@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss", "deepseek_v3", "bloom"])
@pytest.mark.parametrize("cp_kind", ["ring", "ulysses"])
def test_over_four_processes(workers: Callable[[int], WorkerGroup], kind: str, cp_kind: str) -> None:
    workers(4).run(trained, kind, "padded", dict(cp=4, cp_kind=cp_kind))


# Dropout


def dropped(kind: str) -> list[float]:
    """In a worker: the losses of two updates with dropout in attention, twice from the same beginning."""
    torch.set_num_threads(1)
    losses = []
    with dtype_of(torch.float64):
        for _ in range(2):
            strategy = MeshStrategy(device=DEVICE, cp=2)
            strategy.join()
            torch.manual_seed(5)
            model, optim = strategy.setup(build(kind, attention_dropout=0.5), adamw(1))
            losses += train(strategy, model, optim, [[sample("llama", 4, seed)] for seed in range(2)]).losses  # type: ignore[arg-type]
            strategy.leave()
            dist.destroy_process_group()
    return losses


@pytest.mark.parametrize(
    "kind", ["gpt_oss", *(pytest.param(kind, marks=FULL) for kind in ("gemma2", "bloom", "deepseek_v3"))]
)
def test_dropout_of_attention(workers2: WorkerGroup, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    losses, others = workers2.run(dropped, kind)
    assert losses == others
    assert losses[:2] == losses[2:]
    with dtype_of(torch.float64):
        torch.manual_seed(5)
        alone = build(kind)
        batch = sample("llama", 4, 0)
        without = float(alone(input_ids=batch["input_ids"], labels=batch["labels"]).loss)
    assert losses[0] != pytest.approx(without, rel=1e-4)
    assert losses[0] == pytest.approx(without, rel=0.5)


# What is refused

REFUSED: dict[str, str] = {
    "m2m_100": "strategy.cp: 2 is not possible for M2M100ForConditionalGeneration, whose encoder counts positions from 0; use",
    "pegasus_x": "strategy.cp: 2 is not possible for PegasusXForConditionalGeneration, whose encoder counts positions from 0; use",
    "bigbird_pegasus": 'model.config.attention_type: "block_sparse" is not possible with strategy.cp=2, the encoder of BigBird',
    "mpt": "strategy.cp: 2 is not possible for MptForCausalLM, whose forward has no position_ids and counts positions from 0; use",
    "falcon": "model: FalconForCausalLM does not use transformers' attention interface, which cp needs; use dp_shard or tp",
    "llama4": "model: has a mask of its own, cp has causal and full attention, with sliding windows, padding and documents; use",
    "doge": "model: asks for dtype of the mask of its attention, which cp has as a rule and not as a tensor; use dp_shard or tp",
    "hy_v4": "model: takes a part of the mask of its attention, which cp has as a rule and not as a tensor; use dp_shard or tp",
    "gpt_oss, packed": "with strategy.cp documents whose positions begin again are kept apart, which the model has to do on one",
    "gemma2, heads": 'strategy.cp_kind: "ulysses" needs a number of heads that cp * tp = 2 divides, Gemma2ForCausalLM has 3; choose',
    "gemma2, dropout": 'model.config.attention_dropout: 0.1 is not possible with strategy.cp_kind="ring"; set it to 0, or let cp *',
}
THREE = dict(hidden_size=24, num_attention_heads=3, num_key_value_heads=1)
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gemma2, heads": (THREE, dict(cp_kind="ulysses")),
    "gemma2, dropout": (dict(THREE, attention_dropout=0.1), {}),
}


def refusals(names: list[str]) -> dict[str, str]:
    """In a worker: what is said of each, before its first update."""
    torch.set_num_threads(1)
    found = {}
    for name in names:
        kind, change = name.partition(", ")[0], name.partition(", ")[2]
        of_model, of_strategy = OPTIONS.get(name, ({}, {}))
        strategy = MeshStrategy(device=DEVICE, cp=2, **of_strategy)
        strategy.join()
        try:
            model, optim = strategy.setup(build(kind, **of_model), adamw(1))
            batch = BATCHES.get(change, uneven)(sample("llama", 4, 0), 0)
            train(strategy, model, optim, [[batch]])  # type: ignore[arg-type]
        except (ConfigError, StrategyError) as error:
            found[name] = str(error)
        strategy.leave()
        dist.destroy_process_group()
    return found


def test_what_is_refused(workers2: WorkerGroup) -> None:
    transformers = pytest.importorskip("transformers")
    known = [name for name in REFUSED if hasattr(transformers, f"{CONFIGS[name.partition(', ')[0]][0]}Config")]
    for found in workers2.run(refusals, known):
        assert {name: REFUSED[name] for name in known if REFUSED[name] not in found.get(name, "")} == {}, found
        assert not any("\n" in message for message in found.values())


def test_blooms_attention_is_cut_by_one_axis_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = SimpleNamespace(cp=2, tp=2)
    with pytest.raises(ConfigError, match=r"^strategy.tp: 2 is not possible for BloomForCausalLM beside cp=2"):
        check_of_transformers(build("bloom"), config, "ring")
    config.tp = 1
    check_of_transformers(build("bloom"), config, "ring")


# A model keeps its own attention


def _left(kind: str, make: Callable[..., nn.Module]) -> tuple[Any, ...]:
    model = make(kind)
    forwards = [vars(module).get("forward") for module in model.modules()]
    implementation = model.config._attn_implementation
    strategy = MeshStrategy(device=DEVICE, cp=2)
    strategy.join()
    whole, _ = strategy.setup(model, adamw(1))
    inputs = sample("llama", 2, 0)["input_ids"]
    with torch.no_grad():
        called = whole(input_ids=inputs.to(DEVICE)).logits
    strategy.leave()
    dist.destroy_process_group()
    after = [vars(module).get("forward") for module in model.modules()]
    return after == forwards, model.config._attn_implementation == implementation, called


def left(kind: str) -> None:
    """In a worker: outside of training the model is as on one device, and after the strategy as it was."""
    torch.manual_seed(7)
    expected = build(kind)(input_ids=sample("llama", 2, 0)["input_ids"]).logits.detach()
    torch.manual_seed(7)
    same_forwards, same_name, called = _left(kind, build)
    assert same_forwards
    assert same_name
    torch.testing.assert_close(called.cpu(), expected, rtol=1e-4, atol=1e-4)


def test_a_model_has_its_own_attention_outside_of_training_and_afterwards(workers2: WorkerGroup) -> None:
    workers2.run(left, "bloom")


def test_every_kind_is_trained_or_refused() -> None:
    others = {name.partition(",")[0] for name in REFUSED}
    assert {*TOGETHER, *KINDS, *others} == {*CONFIGS}
