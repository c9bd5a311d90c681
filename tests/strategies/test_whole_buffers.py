"""Buffers in full_weights: those of evaluation and of checkpoints, and none of the strategy's own changes."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flextrain import OptimWrapper, Strategy
from flextrain.core.base.registry import STRATEGIES
from flextrain.strategies.parts import full_weights, share_buffers
from flextrain.testing import WorkerGroup
from flextrain.testing.loop import train
from flextrain.testing.models import SmallModel

pytestmark = pytest.mark.distributed

FULL = pytest.mark.full


class Layer(nn.Module):
    """Batch normalisation, and buffers of other types; all but the mask differ between data shards when it trains."""

    rounds: Tensor
    mask: Tensor
    small: Tensor
    level: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.register_buffer("rounds", torch.zeros((), dtype=torch.int16))
        self.register_buffer("mask", torch.tensor([True, True, True, False, True, True]), persistent=False)
        self.register_buffer("small", torch.zeros(6, dtype=torch.bfloat16))
        self.register_buffer("level", torch.zeros(6), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            self.rounds += 1 + int(x.detach().sum() > 0)
            self.level += x.detach().mean()
            self.small.copy_(self.level)
        return torch.tanh(self.norm(self.linear(x))) * self.mask + self.level  # type: ignore[no-any-return]


class Net(SmallModel):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Layer(), Layer(), Layer(), Layer())
        self.head = nn.Linear(6, self.num_classes)

    def logits(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))  # type: ignore[no-any-return]


class Run:
    def __init__(self, strategy: dict[str, Any]) -> None:
        torch.manual_seed(0)
        self.strategy: Strategy = STRATEGIES.build(dict(strategy), "strategy")
        self.strategy.join()
        self.called, optim = self.strategy.setup(Net(), OptimWrapper(dict(type="SGD", lr=0.1)))
        assert isinstance(optim, OptimWrapper)
        self.optim = optim
        self.rank = int(os.environ["RANK"])

    def train(self, seed: int) -> list[float]:
        windows = [[Net.sample(16, 4 * seed + i), Net.sample(16, 4 * seed + i + 1)] for i in (0, 2)]
        return train(self.strategy, self.called, self.optim, windows).losses

    def live(self) -> dict[str, Tensor]:
        return dict(self.strategy.module.named_buffers())


def plain(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[no-any-return]


def parameters(strategy: Strategy) -> dict[str, Tensor]:
    state = strategy.model_state()
    return {name: plain(state[name]) for name, _ in strategy.parameters()}


def values(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: plain(tensor).clone() for name, tensor in tensors.items()}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, tensor in expected.items():
        assert torch.equal(plain(found[name]), plain(tensor)), name


def trains(strategy: dict[str, Any], by_layer: bool, asks: bool) -> tuple[Any, Any, Any]:
    """Train, ask for whole weights in the middle, and write to the buffers that it gives."""
    run = Run(strategy)
    data = run.strategy.topology.data
    try:
        losses = run.train(0)
        objects, before = run.live(), values(run.live())
        weights = {name: tensor.clone() for name, tensor in parameters(run.strategy).items()}
        found = outputs = None
        for _ in range(2 if asks else 0):
            with full_weights(run.strategy, by_layer=by_layer) as model:
                found = {name: tensor.clone() for name, tensor in model.named_buffers()}
                if model is not run.strategy.module:
                    same(run.live(), before)
                    for tensor in model.buffers():
                        tensor.fill_(1)
                    same(run.live(), before)  # what is written to a copy is lost
                    for name, tensor in model.named_buffers():
                        tensor.copy_(found[name])
                outputs = model.eval()(**Net.sample(8, 3), mode="tensor").detach().clone()
            same(run.live(), before)
            assert all(one is objects[name] for name, one in run.live().items())
            same(parameters(run.strategy), weights)
        losses += run.train(2)
        if asks:
            with full_weights(run.strategy) as model:
                given = {name: tensor.clone() for name, tensor in model.named_buffers()}
            share_buffers(run.strategy)  # what evaluation does
            same(given, {name: one for name, one in run.live().items() if one.is_floating_point()})
        return losses, (found, outputs), (data.index, before)
    finally:
        run.strategy.leave()


def check(group: WorkerGroup, strategy: dict[str, Any], by_layer: bool = False) -> None:
    undisturbed = group.run(trains, strategy, by_layer, False)
    asked = group.run(trains, strategy, by_layer, True)
    assert [losses for losses, *_ in asked] == [losses for losses, *_ in undisturbed]
    own = [before for *_, (_, before) in asked]
    expected: dict[str, Tensor] = {}
    for _, _, (index, before) in asked:
        if index == 0:
            expected |= {name: one for name, one in before.items() if name not in expected}
    differing = {n for one in own for n in one if not torch.equal(one[n], expected[n])}
    assert {"layers.0.level", "layers.3.rounds", "layers.0.norm.running_mean"} <= differing, (
        "the replicas of this test are equal"
    )
    for _, (found, outputs), (_, before) in asked:
        assert found.keys() == expected.keys()
        kept = {name: one for name, one in before.items() if not one.is_floating_point()}  # a process's own
        same(found, expected | kept)
        torch.testing.assert_close(outputs, asked[0][1][1], rtol=0, atol=0)


TWO = {
    "ddp": dict(type="DDPStrategy", model_wrapper=dict(broadcast_buffers=False)),
    "fsdp": dict(type="FSDPStrategy", wrap="blocks"),
    "zero2": dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=2)),
    "zero3": dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=3, stage3_param_persistence_threshold=0)),
}
FOUR = {
    "pp2 dp2": dict(type="MeshStrategy", pp=2, dp_shard=2, wrap="blocks"),
    "pp2 replicas": dict(type="MeshStrategy", pp=2, dp_replicate=2),
    "interleaved": dict(
        type="MeshStrategy", pp=2, dp_replicate=2, pp_schedule="interleaved_1f1b", pp_stages_per_process=2
    ),
    "tp2 dp2": dict(type="MeshStrategy", tp=2, dp_shard=2, plan={"layers.*.linear": "colwise_gather_output"}),
}


def cases(strategies: dict[str, Any], quick: str) -> list[Any]:
    pairs = itertools.product(strategies.items(), (False, True))
    return [
        pytest.param(
            strategy,
            by_layer,
            id=f"{name} by layer" if by_layer else name,
            marks=() if (name, by_layer) == (quick, False) else FULL,
        )
        for (name, strategy), by_layer in pairs
    ]


@pytest.mark.parametrize(("strategy", "by_layer"), cases(TWO, quick="ddp"))
def test_buffers_are_those_of_evaluation(workers2: WorkerGroup, strategy: dict[str, Any], by_layer: bool) -> None:
    check(workers2, strategy, by_layer)


@pytest.mark.parametrize(("strategy", "by_layer"), cases(FOUR, quick="pp2 dp2"))
def test_buffers_under_meshes_of_four(
    workers: Callable[[int], WorkerGroup], strategy: dict[str, Any], by_layer: bool
) -> None:
    check(workers(4), strategy, by_layer)
