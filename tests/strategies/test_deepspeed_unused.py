"""DeepSpeedStrategy with layers that some updates, or some micro-batches, do not use: their gradients are zeros there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flextrain.core.base.errors import StrategyError
from flextrain.optim import AmpOptimWrapper, OptimWrapper
from flextrain.optim.canonical import STATE, split_key
from flextrain.strategies import DeepSpeedStrategy
from flextrain.testing import WorkerGroup
from flextrain.testing.differences import relative_difference
from flextrain.testing.loop import windows
from flextrain.testing.models import SmallModel
from flextrain.testing.sessions import run, single_device, started

pytest.importorskip("deepspeed", reason="needs pip install flextrain[deepspeed]")
pytestmark = [pytest.mark.deepspeed, pytest.mark.distributed]


class Sometimes(SmallModel):
    """Two layers, each with a pattern of the micro-batches that use it."""

    # In windows of two micro-batches: used in both, in the second alone, in none, in the first alone, the second again.
    patterns = ((1, 1, 0, 1, 0, 0, 1, 0, 0, 1, 0, 0), (0, 1, 1, 0, 1, 1, 0, 0, 0, 1, 0, 0))

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 13)
        self.sometimes = nn.ModuleList([nn.Linear(13, 13), nn.Linear(13, 13)])
        self.head = nn.Linear(13, self.num_classes)
        self.calls = 0

    def logits(self, x: Tensor) -> Tensor:
        """See SmallModel; x is (batch, 6)."""
        x = torch.tanh(self.first(x))
        for pattern, layer in zip(self.patterns, self.sometimes, strict=True):
            if pattern[self.calls]:
                x = x + layer(x)
            else:
                x = self.left_out(x, layer)
        self.calls += 1
        found: Tensor = self.head(x)
        return found

    def left_out(self, x: Tensor, layer: nn.Module) -> Tensor:
        """``x`` without the layer."""
        return x


class TimesZero(Sometimes):
    """The same, with gradients of zero where the other has none."""

    def left_out(self, x: Tensor, layer: nn.Module) -> Tensor:
        """``x`` with the layer, multiplied by zero."""
        found: Tensor = x + 0 * layer(x)
        return found


def zero(stage: int, **options: Any) -> dict[str, Any]:
    if options.pop("offload", False):
        options["offload_optimizer"] = dict(device="cpu", pin_memory=False)
    spec = dict(type=DeepSpeedStrategy, device="cpu", unused_parameters="zeros")
    return spec | dict(zero_optimization=dict(stage=stage, **options))


def optim(accumulate: int, half: bool) -> OptimWrapper:
    options: dict[str, Any] = dict(accumulative_counts=accumulate, clip_grad=dict(max_norm=0.1))
    optimizer = dict(type="AdamW", lr=3e-3, weight_decay=0.1)
    return AmpOptimWrapper(optimizer, dtype="bfloat16", **options) if half else OptimWrapper(optimizer, **options)


def differences(spec: dict[str, Any], accumulate: int, half: bool) -> dict[str, float]:
    """The largest differences from training with zeros: on one device in float32, with the same strategy in bfloat16."""
    batches = windows([Sometimes.sample(8, seed=i) for i in range(12)], accumulate)
    wrapper = optim(accumulate, half)
    reference = started(spec, wrapper, TimesZero) if half else single_device(wrapper, TimesZero)
    with reference as session:
        expected = run(session, batches)
    with started(spec, optim(accumulate, half), Sometimes) as session:
        found = run(session, batches)
    norms = zip(found.trace.grad_norms, expected.trace.grad_norms, strict=True)
    return {
        "norm": max(abs(a / b - 1) for a, b in norms if a is not None and b is not None),
        "weights": max(relative_difference(found.weights[-1][k], v) for k, v in expected.weights[-1].items()),
    }


OFFLOADED_2 = zero(2, offload=True)
SPECS: list[Any] = [
    pytest.param(OFFLOADED_2, id="2-offload"),
    pytest.param(zero(1, offload=True), id="1-offload"),
    pytest.param(zero(3), id="3"),
    *(
        pytest.param(zero(stage, **options), id=f"{stage}-{'-'.join(options)}", marks=pytest.mark.full)
        for stage, options in (
            (0, {}),
            (1, {}),
            (2, {}),
            (2, dict(contiguous_gradients=False, reduce_scatter=False)),
            (2, dict(overlap_comm=True, reduce_bucket_size=50)),
            (2, dict(overlap_comm=True, reduce_bucket_size=50, offload=True)),
            (2, dict(contiguous_gradients=False, reduce_scatter=False, offload=True)),
            (3, dict(offload=True)),
            (3, dict(overlap_comm=True, reduce_bucket_size=50)),
        )
    ),
]


def unused(spec: dict[str, Any]) -> list[dict[str, float]]:
    return [differences(spec, accumulate, half) for accumulate, half in ((1, False), (2, False), (2, True))]


@pytest.mark.parametrize("spec", SPECS)
def test_an_unused_layer_has_a_gradient_of_zero(workers2: WorkerGroup, spec: dict[str, Any]) -> None:
    for every in workers2.run(unused, spec):
        for found in every:
            assert max(found.values()) < 1e-5, every


class ThenInfinite(Sometimes):
    """The first layer's gradient is infinite in the first update, and it is not used in the second."""

    patterns = ((1, 0, 0, 1, 0, 0), (1, 1, 1, 1, 1, 1))

    def logits(self, x: Tensor) -> Tensor:
        """See SmallModel; x is (batch, 6)."""
        found = super().logits(x)
        return found * torch.inf if self.calls == 1 else found


def after_a_skipped_update(spec: dict[str, Any], accumulate: int) -> tuple[list[bool], bool, float]:
    """The skipped updates, whether all weights are finite at the end, and how far the layer has moved."""
    batches = windows([Sometimes.sample(8, seed=i) for i in range(6)], accumulate)
    with started(spec, optim(accumulate, True), ThenInfinite) as session:
        found = run(session, batches)
    first, last = found.weights[0], found.weights[-1]
    moved = relative_difference(last["model.sometimes.0.weight"], first["model.sometimes.0.weight"])
    return found.trace.skipped, all(bool(value.isfinite().all()) for value in last.values()), moved


@pytest.mark.parametrize("stage", [1, 2, pytest.param(3, marks=pytest.mark.full)])
def test_gradients_of_a_skipped_update_are_gone(workers2: WorkerGroup, stage: int) -> None:
    spec = zero(stage, offload=True) | dict(bf16=dict(enabled=True, check_grad_overflow=True))
    for accumulate in (1, 2):
        for skipped, finite, moved in workers2.run(after_a_skipped_update, spec, accumulate):
            assert skipped == [True] + [False] * (6 // accumulate - 1)
            assert finite
            assert moved > 1e-4


class Never(Sometimes):
    """Nobody ever uses the second layer."""

    patterns = (Sometimes.patterns[0][:2] * 6, (0,) * 12)


def left_alone(stage: int, optimizer: dict[str, Any], model: type[Sometimes]) -> tuple[float | str, list[str]]:
    """In a worker: the difference from one device, or what was raised; and for which parameters there is state."""
    spec = zero(stage) | dict(unused_parameters="refuse")
    batches = windows([Sometimes.sample(8, seed=i) for i in range(12)], 2)
    with single_device(OptimWrapper(optimizer), model) as session:
        expected = run(session, batches).weights[-1]
    with started(spec, OptimWrapper(optimizer), model) as session:
        try:
            found = run(session, batches).weights[-1]
        except StrategyError as error:
            return str(error), []
        kept = {split_key(key)[1] for key in session.strategy.state() if key.startswith(STATE)}
        return max(relative_difference(found[key], value) for key, value in expected.items()), sorted(kept)


ADAM = dict(type="AdamW", lr=3e-3, weight_decay=0.1)
MOMENTUM = dict(type="SGD", lr=0.1, momentum=0.9, weight_decay=0.1)


@pytest.mark.parametrize(
    "stage", [pytest.param(0, marks=pytest.mark.full), pytest.param(1, marks=pytest.mark.full), 2, 3]
)
def test_what_nobody_uses_stays_as_it_is(workers2: WorkerGroup, stage: int) -> None:
    for optimizer, model in ((MOMENTUM, Sometimes), (ADAM, Never)):
        for difference, kept in workers2.run(left_alone, stage, optimizer, model):
            assert isinstance(difference, float), difference
            assert difference < 1e-5
            assert ("sometimes.1.weight" in kept) == (model is Sometimes)
            assert "sometimes.0.weight" in kept
    for difference, _ in workers2.run(left_alone, stage, ADAM, Sometimes):
        if stage:  # which counts the updates of all parameters together
            assert "model.sometimes.0.weight: is used in update 4 since the start, after 1 updates" in str(difference)
        else:
            assert isinstance(difference, float), difference
            assert difference < 1e-5
    for difference, _ in workers2.run(left_alone, stage, dict(type="NAdam", lr=1e-3), Never) if stage else ():
        assert "model.sometimes.1.weight: no process has used it in update 1 since the start" in str(difference)
