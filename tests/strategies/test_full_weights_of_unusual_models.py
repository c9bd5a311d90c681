"""full_weights of models whose buffers come and go, of calls that differ between processes, and of writes inside."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flextrain import OptimWrapper, Strategy
from flextrain.core.base.errors import ConfigError, StrategyError
from flextrain.core.base.registry import STRATEGIES
from flextrain.strategies.parts import full_weights
from flextrain.testing import WorkerGroup
from flextrain.testing.loop import train
from flextrain.testing.models import SmallModel

pytestmark = pytest.mark.distributed

FULL = pytest.mark.full
DDP = dict(type="DDPStrategy")
FSDP = dict(type="FSDPStrategy", wrap="blocks")
ZERO3 = dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=3, stage3_param_persistence_threshold=0))
PP = dict(type="MeshStrategy", pp=2)
EVERY = [FSDP, *(pytest.param(one, marks=FULL) for one in (DDP, ZERO3, PP))]
NAMES = ["fsdp", "ddp", "zero3", "pp2"]


class Layer(nn.Module):
    """Keeps what it has seen: a buffer that training adds, one that it removes, and a cache of its last calls."""

    old: Tensor | None
    seen: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("old", torch.ones(3))
        self.register_buffer("seen", None)
        self.register_buffer("cache", torch.zeros(6), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            self.old = None
            if self.seen is None:
                self.seen = torch.zeros(2, dtype=torch.uint8)
                self.register_buffer("late", torch.full((4,), 2.5), persistent=False)
            self.seen = torch.cat([self.seen, torch.ones(1, dtype=torch.uint8)])  # its shape changes too
        shift = 0 if self.seen is None else self.seen.sum() + self.late.sum()
        if not self.training:
            self.cache = 0.5 * self.cache + x.mean(0)  # replaced, as a cache of former tokens may be
            return torch.tanh(self.linear(x) + 0.1 * self.cache) + 0.01 * shift
        return torch.tanh(self.linear(x)) + 0.01 * shift  # type: ignore[no-any-return]


class Net(SmallModel):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Layer(), Layer(), Layer())
        self.head = nn.Linear(6, self.num_classes)

    def logits(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))  # type: ignore[no-any-return]


class Run:
    def __init__(self, strategy: dict[str, Any], build: Callable[[], nn.Module] = Net) -> None:
        torch.manual_seed(0)
        self.reference = build()
        torch.manual_seed(0)
        self.strategy: Strategy = STRATEGIES.build(dict(strategy), "strategy")
        self.strategy.join()
        self.called, optim = self.strategy.setup(build(), OptimWrapper(dict(type="SGD", lr=0.1)))
        assert isinstance(optim, OptimWrapper)
        self.optim, self.rank = optim, int(os.environ["RANK"])
        self._of_reference = torch.optim.SGD(self.reference.parameters(), lr=0.1)

    def train(self, seed: int) -> list[float]:
        batches = [Net.sample(24, seed), Net.sample(24, seed + 1)]
        self.reference.train()
        for batch in batches:
            self.reference(**batch)["loss"].backward()
            self._of_reference.step()
            self._of_reference.zero_grad()
        return train(self.strategy, self.called, self.optim, [[batch] for batch in batches]).losses

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        self.strategy.leave()


def outputs(model: nn.Module, times: int = 3) -> list[Tensor]:
    batch = Net.sample(8, 9)
    model.eval()
    with torch.no_grad():
        return [model(**batch, mode="tensor") for _ in range(times)]


def buffers_come_and_go(strategy: dict[str, Any], by_layer: bool) -> None:
    with Run(strategy) as run:
        run.train(0)
        cache = [(module, module.cache) for module in run.strategy.module.modules() if isinstance(module, Layer)]
        with full_weights(run.strategy, by_layer=by_layer) as model:
            assert {n for n, _ in model.named_buffers()} == {n for n, _ in run.reference.named_buffers()}
            for name, buffer in run.reference.named_buffers():
                torch.testing.assert_close(model.get_buffer(name), buffer)
            assert model.state_dict().keys() == run.reference.state_dict().keys()  # as persistent as they were
            for one, other in zip(outputs(model), outputs(run.reference), strict=True):
                torch.testing.assert_close(one, other)
            if model is not run.strategy.module:
                assert all(module.cache is before for module, before in cache)


@pytest.mark.parametrize("by_layer", [False, True], ids=["whole", "by_layer"])
@pytest.mark.parametrize("strategy", EVERY, ids=NAMES)
def test_buffers_that_come_go_and_change(workers2: WorkerGroup, strategy: dict[str, Any], by_layer: bool) -> None:
    workers2.run(buffers_come_and_go, strategy, by_layer)


def clears(module: nn.Linear, args: Any, output: Any) -> None:
    module.bias.zero_()


def writes_at_once(model: nn.Module) -> None:
    with torch.no_grad():
        model.get_parameter("layers.1.linear.bias").mul_(2)
    outputs(model)


def writes_when_called(model: nn.Module) -> None:
    """While the layer is there, by a hook of the user's."""
    model.get_submodule("layers.1.linear").register_forward_hook(clears)  # type: ignore[arg-type]
    outputs(model)


def writes_to_a_layer() -> None:
    with Run(FSDP) as run:
        for write in (writes_at_once, writes_when_called):
            with (
                pytest.raises(StrategyError, match=r"full_weights: model.layers.1.linear.bias was written to inside"),
                full_weights(run.strategy, by_layer=True) as model,
            ):
                write(model)
        with full_weights(run.strategy, by_layer=True) as model:
            outputs(model)


def test_layer_by_layer_writes_to_a_layer_are_refused(workers2: WorkerGroup) -> None:
    workers2.run(writes_to_a_layer)


def fails_on_one_process(strategy: dict[str, Any]) -> list[float]:
    with Run(strategy) as run:
        losses = run.train(0)
        wrong: list[tuple[dict[str, Any], str]] = [
            (dict(ranks=[5]), "full_weights.ranks: 5 is not allowed, give numbers from 0 to 1"),
            (dict(ranks=1), "full_weights.ranks: 1 is not allowed, give numbers from 0 to 1 in a list"),
            (dict(memory_limit="2 GiX"), 'memory_limit: "2 GiX" is not allowed'),
        ]
        for options, said in wrong:
            with (
                pytest.raises(ConfigError, match=said),
                full_weights(run.strategy, **options if run.rank == 1 else {}),
            ):
                raise AssertionError("not reached")
        try:
            with full_weights(run.strategy) as model:
                if run.rank == 1:
                    raise KeyError("on one process")
                outputs(model)
        except KeyError:
            assert run.rank == 1
        with full_weights(run.strategy) as model:
            with pytest.raises(StrategyError, match="is open already"), full_weights(run.strategy):
                raise AssertionError("not reached")
            outputs(model)
        return losses + run.train(2)


def trains(strategy: dict[str, Any]) -> list[float]:
    with Run(strategy) as run:
        return run.train(0) + run.train(2)


@pytest.mark.parametrize("strategy", EVERY, ids=NAMES)
def test_training_goes_on_after_errors_of_one_process(workers2: WorkerGroup, strategy: dict[str, Any]) -> None:
    assert workers2.run(fails_on_one_process, strategy) == workers2.run(trains, strategy)


class Spectral(Net):
    """Parametrised weights, a shared buffer, complex and half-precision ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)) for _ in range(2)))
        self.register_buffer("rough", torch.eye(6, dtype=torch.bfloat16))
        self.register_buffer("phase", torch.polar(torch.ones(6), torch.arange(6.0)))
        self.register_buffer("same", torch.full((6,), 0.3, dtype=torch.float16))
        self.again = nn.Module()
        self.again.register_buffer("same", self.same)

    def logits(self, x: Tensor) -> Tensor:
        x = (x.bfloat16() @ self.rough).float() * self.phase.real + self.again.same
        return self.head(torch.tanh(self.layers(x)))  # type: ignore[no-any-return]


def is_as_one_device(strategy: dict[str, Any], by_layer: bool) -> None:
    with Run(strategy, Spectral) as run:
        run.train(0)
        with full_weights(run.strategy, by_layer=by_layer) as model:
            assert isinstance(model, Spectral)
            for one, other in zip(outputs(model), outputs(run.reference), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
            assert model.again.same is model.same
            assert (model.rough.dtype, model.phase.dtype) == (torch.bfloat16, torch.complex64)


@pytest.mark.parametrize("by_layer", [False, True], ids=["whole", "by_layer"])
@pytest.mark.parametrize("strategy", [dict(type="FSDPStrategy"), pytest.param(DDP, marks=FULL)], ids=["fsdp", "ddp"])
def test_parametrised_weights_and_buffers_of_many_types(
    workers2: WorkerGroup, strategy: dict[str, Any], by_layer: bool
) -> None:
    workers2.run(is_as_one_device, strategy, by_layer)
