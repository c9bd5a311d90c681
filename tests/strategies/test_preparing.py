"""A strategy without a runner: model, optimizer and schedules for a loop of one's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from flextrain import MODELS, ConfigError, SingleDeviceStrategy, StrategyError
from flextrain.strategies.parts import prepare
from flextrain.testing import WorkerGroup

SGD = dict(optimizer=dict(type="SGD", lr=0.1), accumulative_counts=2.0)


@MODELS.register_module(force=True)
class Line(nn.Module):
    def __init__(self, start: float = 0.5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([start]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).mean()


def own_loop(kind: str, **options: Any) -> tuple[list[float], list[float]]:
    """Rates and weights of four micro-batches, which are two updates, over two epochs of a schedule."""
    import flextrain

    strategy = getattr(flextrain, kind)(device="cpu", **options)
    model, optim, schedulers = prepare(
        strategy,
        Line(),
        optim_wrapper=SGD,
        param_scheduler=dict(type="LinearLR", start_factor=0.5, by_epoch=False),
        dispatch_kwargs=dict(epoch_length=2, max_epochs=2, max_iters=3),
    )
    rates, weights = [], []
    for number in range(4):
        data = torch.full((2,), float(number + 1 + strategy.topology.rank))
        optim.update_params(model(data))
        rates.append(optim.get_lr()["lr"][0])
        schedulers[0].step()
        weights += [float((p.full_tensor() if hasattr(p, "full_tensor") else p).detach()) for p in model.parameters()]
    strategy.leave()
    return rates, weights


def test_own_loop() -> None:
    rates, weights = own_loop("SingleDeviceStrategy")
    assert rates == pytest.approx([0.05, 0.075, 0.1, 0.1])
    assert weights == pytest.approx([0.5, 0.5 - 0.075 * 1.5, 0.3875, 0.3875 - 0.1 * 3.5])


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["DDPStrategy", "FSDPStrategy"])
def test_own_loop_on_two_processes(workers2: WorkerGroup, kind: str) -> None:
    """The second process's data is larger by one, and gradients are means."""
    expected = [0.5, 0.5 - 0.075 * 2.0, 0.35, 0.35 - 0.1 * 4.0]
    for _, weights in workers2.run(own_loop, kind):
        assert weights == pytest.approx(expected)


def test_what_is_returned() -> None:
    model = SingleDeviceStrategy().prepare(dict(type="Line", start=2.0))
    assert float(model.weight) == 2.0
    model, optim = SingleDeviceStrategy().prepare(Line, optim_wrapper=SGD)
    assert optim.accumulate == 2
    two = {name: dict(optimizer=dict(type="SGD", lr=0.1)) for name in ("a", "b")}
    strategy = SingleDeviceStrategy()
    pair = nn.ModuleDict({"a": Line(), "b": Line()})
    _, _, schedulers = prepare(strategy, pair, optim_wrapper=two, param_scheduler=dict(type="StepLR", step_size=1))
    assert sorted(schedulers) == ["a", "b"]
    with pytest.raises(StrategyError, match="a strategy serves one model"):
        prepare(strategy, pair, optim_wrapper=two)


@pytest.mark.parametrize(
    "options, message",
    [
        (
            dict(param_scheduler=dict(type="StepLR", step_size=1)),
            "^param_scheduler: has no meaning without optim_wrapper",
        ),
        (
            dict(optim_wrapper=SGD, dispatch_kwargs=dict(max_epoch=1)),
            '^dispatch_kwargs.max_epoch: unknown key, did you mean "max_epochs"',
        ),
        (
            dict(optim_wrapper=dict(SGD, accumulative_counts=1.5)),
            "accumulative_counts: 1.5 is not allowed, give a whole number",
        ),
    ],
)
def test_what_is_wrong(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SingleDeviceStrategy().prepare(Line(), **options)
