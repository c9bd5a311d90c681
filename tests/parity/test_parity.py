"""Every strategy makes the training run that a single device makes on the same global batches.

Here with the strategy and the OptimWrapper alone; test_runner_parity.py has the same through FlexibleRunner. A strategy is
one more entry of STRATEGIES.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from flextrain import AmpOptimWrapper, OptimWrapper
from flextrain.testing import WorkerGroup
from flextrain.testing.differences import relative_difference, same_numbers, same_tensors
from flextrain.testing.loop import Trace, train, windows
from flextrain.testing.models import Batch, ConvNet, HalfFrozen, Mlp, SmallModel, TinyTransformer
from flextrain.testing.sessions import Session, single_device, started, whole_model

from ..device import DEVICE

pytestmark = pytest.mark.distributed

Weights = dict[str, Tensor]
UPDATES = 16
LONG = 50  # a run of each strategy under ``full``
BATCH = 8  # samples in a global micro-batch
# Float32 rounds each sum to 6e-8 of its size, and a sum over processes is rounded in another order. Over 50 updates these
# add up like noise to a few times that; a different sum is off by far more than a millionth.
TOLERANCE = 1e-6
# Bfloat16 keeps 8 bits: a product or a gradient is off by up to 2^-9 of its size wherever it is rounded, and micro-batches of
# other sizes round other numbers. Under each of the two strategies a gradient is rounded about twice on its way, so that
# updates differ by at most 4 x 2^-9 of their length: the weights by 2^-7 of the way they went, and losses and gradient norms,
# which these weights give, by that much of their size.
BF16 = 2.0**-7
# ZeRO rounds the weights themselves and all that is computed with them, and not the operands of products alone, which makes
# it twice as many roundings. A bias's gradient is then a sum of rounded terms that cancel, and so is the way it goes: up to
# four times that is allowed there.
ZERO_BF16 = 2.0**-6
CANCELLING = 4

STRATEGIES: list[dict[str, Any]] = [
    dict(type="DDPStrategy"),
    dict(type="FSDPStrategy"),
    *(dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=stage)) for stage in range(4)),
]
# Options that change how a strategy goes about it: a few recipes each.
VARIANTS: list[dict[str, Any]] = [
    dict(type="DDPStrategy", gradient_as_bucket_view=True, static_graph=True),
    dict(type="DDPStrategy", find_unused_parameters=True, bucket_cap_mb=0.001),
    dict(type="FSDPStrategy", wrap=["Linear"], reshard_after_forward=True, prefetch=2),
    dict(type="FSDPStrategy", wrap=["Linear"], reduce_every_micro_batch=True, reshard_after_forward=False),
    dict(type="FSDPStrategy", replicate_size=2),
]
MODELS: list[type[SmallModel]] = [Mlp, ConvNet, TinyTransformer, HalfFrozen]

ADAMW = dict(type="AdamW", lr=2e-3, weight_decay=0.05)
MOMENTUM = dict(type="SGD", lr=0.02, momentum=0.9, weight_decay=1e-3)


@dataclass(frozen=True)
class Recipe:
    """What an update is, and how many samples the micro-batches of an epoch have."""

    optimizer: dict[str, Any]
    epoch: tuple[int, ...] = (BATCH,) * 5
    options: dict[str, Any] = field(default_factory=dict)
    bf16: bool = False
    ragged: bool = False  # leave out targets, more on one process than on the other

    def optim(self) -> OptimWrapper:
        if self.bf16:
            return AmpOptimWrapper(self.optimizer, dtype="bfloat16", **self.options)
        return OptimWrapper(self.optimizer, **self.options)

    def tolerance(self, strategy: dict[str, Any]) -> float:
        if not self.bf16:
            return TOLERANCE
        return ZERO_BF16 if strategy["type"] == "DeepSpeedStrategy" else BF16


CLIP = dict(clip_grad=dict(max_norm=0.1))
RECIPES = {
    "adamw": Recipe(ADAMW),
    "momentum": Recipe(MOMENTUM),
    "clip": Recipe(MOMENTUM, options=CLIP),
    "adamw-clip": Recipe(ADAMW, options=CLIP),
    # Ten micro-batches in windows of four: each epoch ends with one of two.
    "accumulate": Recipe(ADAMW, (BATCH,) * 10, dict(accumulative_counts=4)),
    "accumulate-clip": Recipe(MOMENTUM, (BATCH,) * 10, dict(accumulative_counts=4, **CLIP)),
    "smaller-last-batch": Recipe(ADAMW, (BATCH, BATCH, 4)),
    "uneven-counts": Recipe(MOMENTUM, (BATCH, 5, 3), CLIP),
    "uneven-counts-accumulate": Recipe(MOMENTUM, (BATCH, 7, 2, 3, 5), dict(accumulative_counts=2)),
    "bf16": Recipe(MOMENTUM, bf16=True),
    "bf16-clip": Recipe(MOMENTUM, options=CLIP, bf16=True),
    "bf16-accumulate": Recipe(MOMENTUM, (BATCH,) * 10, dict(accumulative_counts=4), bf16=True),
    "bf16-accumulate-clip": Recipe(MOMENTUM, (BATCH,) * 10, dict(accumulative_counts=4, **CLIP), bf16=True),
    "ragged-targets": Recipe(MOMENTUM, (BATCH,) * 5, dict(accumulative_counts=2), ragged=True),
}
# Each has what no other has; what they combine stands alone under ``full``, beside these on other models.
ALWAYS = {
    "accumulate-clip": TinyTransformer,
    "smaller-last-batch": TinyTransformer,
    "uneven-counts": HalfFrozen,
    "uneven-counts-accumulate": Mlp,
    "bf16-accumulate-clip": Mlp,
    "ragged-targets": ConvNet,
}
# With or without accumulation, clipping and bfloat16.
ON_ALL_MODELS = (
    "adamw",
    "adamw-clip",
    "accumulate",
    "accumulate-clip",
    "bf16",
    "bf16-clip",
    "bf16-accumulate",
    "bf16-accumulate-clip",
)


def global_windows(model: type[SmallModel], recipe: Recipe, updates: int) -> list[list[Batch]]:
    """The windows of ``updates`` updates: epoch after epoch over the same samples."""
    epoch = [model.sample(count, seed=i) for i, count in enumerate(recipe.epoch)]
    if recipe.ragged:
        for i, batch in enumerate(epoch):
            targets = batch["y"].view(-1)
            targets[: targets.numel() // 8 * (1 + i % 3)] = -100
    one = windows(epoch, recipe.optim().accumulate)
    return (one * (updates // len(one) + 1))[:updates]


def trained(session: Session, data: list[list[Batch]]) -> tuple[Trace, Weights]:
    return train(session.strategy, session.model, session.optim, data), whole_model(session.strategy)


@functools.cache
def alone(model: type[SmallModel], name: str, updates: int) -> tuple[Trace, Weights, Weights, list[str]]:
    """On a single device, once in each process: what happened, all weights before and after, and the names of those trained."""
    recipe = RECIPES[name]
    with single_device(recipe.optim(), model, device=DEVICE) as single:
        before = whole_model(single.strategy)
        expected, weights = trained(single, global_windows(model, recipe, updates))
        trainable = [f"model.{name}" for name, p in single.strategy.module.named_parameters() if p.requires_grad]
    return expected, before, weights, trainable


def compare(strategy: dict[str, Any], model: type[SmallModel], name: str, updates: int = UPDATES) -> Trace:
    """In a worker: train under the strategy, and hold it against what a single device made of the same."""
    recipe = RECIPES[name]
    data = global_windows(model, recipe, updates)
    tolerance = recipe.tolerance(strategy)
    expected, before, weights, trainable = alone(model, name, updates)
    with started({**strategy, "device": DEVICE}, recipe.optim(), model) as session:
        found, found_weights = trained(session, data)
    same_numbers(found.losses, expected.losses, "the loss", tolerance)
    same_numbers(found.grad_norms, expected.grad_norms, "the gradient norm", tolerance)
    if recipe.bf16:
        for key, value in weights.items():
            # The gradient of a scalar is one sum whose terms cancel, rounded: it is 6 % off that in float32 in the first place.
            allowed = tolerance * (CANCELLING if tolerance == ZERO_BF16 or value.dim() == 0 else 1)
            way, off = (float(torch.dist(value.double(), other[key].double())) for other in (before, found_weights))
            assert off <= allowed * way, f"{key}: off by {off:.2e}, it went {way:.2e}"
    else:
        same_tensors(found_weights, weights, "final weights", tolerance)
    assert found_weights.keys() == weights.keys()
    assert all(relative_difference(weights[name], before[name]) > 1e-3 for name in trainable)
    return found


def label(strategy: dict[str, Any], model: type[SmallModel], recipe: str) -> str:
    return "-".join([name_of(strategy), model.__name__, recipe])


def name_of(strategy: dict[str, Any]) -> str:
    if "zero_optimization" in strategy:
        return f"ZeRO-{strategy['zero_optimization']['stage']}"
    return "-".join([strategy["type"], *(key for key in strategy if key != "type")])


def cases() -> list[Any]:
    """Every recipe with every strategy, the models in turn, and some recipes with all of them."""
    found = []
    for strategy in STRATEGIES:
        for i, name in enumerate(RECIPES):
            for model in MODELS:
                if model is MODELS[i % len(MODELS)] or name in ON_ALL_MODELS:
                    found.append(((strategy, model, name), model is ALWAYS.get(name)))
    for strategy in VARIANTS:
        found.append(((strategy, TinyTransformer, "accumulate-clip"), True))
        found.append(((strategy, HalfFrozen, "smaller-last-batch"), True))
    return [pytest.param(*case, id=label(*case), marks=marks(case[0], always)) for case, always in found]


def marks(strategy: dict[str, Any], always: bool) -> list[pytest.MarkDecorator]:
    engine = [pytest.mark.deepspeed] if strategy["type"] == "DeepSpeedStrategy" else []
    return engine if always else [*engine, pytest.mark.full]


@pytest.mark.parametrize("strategy, model, recipe", cases())
def test_parity(workers2: WorkerGroup, strategy: dict[str, Any], model: type[SmallModel], recipe: str) -> None:
    first, second = workers2.run(compare, strategy, model, recipe)
    assert first == second
    assert sum(first.losses[-10:]) < sum(first.losses[:10])
    assert first.skipped == [False] * UPDATES
    max_norm = RECIPES[recipe].options.get("clip_grad", {}).get("max_norm")
    if max_norm is not None:
        assert any(norm is not None and norm > max_norm for norm in first.grad_norms), "nothing was clipped"


@pytest.mark.parametrize("strategy", STRATEGIES, ids=name_of)
def test_parity_on_three_processes(workers3: WorkerGroup, strategy: dict[str, Any]) -> None:
    workers3.run(compare, strategy, TinyTransformer, "accumulate-clip")


@pytest.mark.full
@pytest.mark.parametrize("recipe", ["accumulate-clip", "bf16-accumulate-clip"])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=name_of)
def test_parity_in_a_long_run(workers2: WorkerGroup, strategy: dict[str, Any], recipe: str) -> None:
    workers2.run(compare, strategy, TinyTransformer, recipe, LONG)
