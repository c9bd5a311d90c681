"""train() or val() once more after an exception in the middle, as Ctrl-C in a notebook is: nothing of it counts twice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flextrain import BaseMetric, FlexibleRunner, SingleDeviceStrategy, StrategyError

from .training import SGD, Net, Stop, StopAt, differences, make_runner, validation, whole_state

pytestmark = pytest.mark.usefixtures("quick")


class Fragile(Net):
    """Has no dropout, and raises KeyboardInterrupt once, in one of its forward or backward passes."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.passes, self.fails_at, self.in_backward = 0, -1, False

    def forward(self, index: Any, x: Tensor, y: Tensor, mode: str = "tensor") -> Any:
        self.passes += 1
        found = super().forward(index, x, y, mode)
        if self.passes == self.fails_at:
            if not self.in_backward:
                raise KeyboardInterrupt
            self.net[0].bias.register_hook(self.fail)  # when the last layer has its gradients
        return found

    def fail(self, gradient: Tensor) -> None:
        if self.passes == self.fails_at:
            self.passes += 1
            raise KeyboardInterrupt


def trained(folder: Path, interrupt: Callable[[Fragile], None], accumulate: int = 3, **changes: Any) -> FlexibleRunner:
    torch.manual_seed(0)
    model = Fragile()
    optim = dict(optimizer=SGD, accumulative_counts=accumulate)
    runner = make_runner(folder, model=model, optim_wrapper=optim, **changes)
    interrupt(model)
    if model.fails_at > 0:
        with pytest.raises(KeyboardInterrupt):
            runner.train()
    runner.train()
    return runner


def nowhere(model: Fragile) -> None:
    """Let it run through."""


def in_forward(model: Fragile) -> None:
    model.fails_at = 5


def in_backward(model: Fragile) -> None:
    model.fails_at, model.in_backward = 5, True


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("interrupt", [in_forward, in_backward])
def test_an_update_that_was_interrupted_is_made_anew(
    tmp_path: Path, interrupt: Callable[[Fragile], None], accumulate: int
) -> None:
    expected = whole_state(trained(tmp_path / "whole", nowhere, accumulate))
    assert not differences(whole_state(trained(tmp_path / "torn", interrupt, accumulate)), expected)


@pytest.mark.parametrize("strategy", ["FSDPStrategy", pytest.param("DeepSpeedStrategy", marks=pytest.mark.deepspeed)])
def test_a_strategy_that_keeps_gradients_elsewhere_does_not_go_on(tmp_path: Path, strategy: str) -> None:
    model = Fragile()
    runner = make_runner(tmp_path, model=model, strategy=strategy)
    try:
        in_forward(model)
        with pytest.raises(KeyboardInterrupt):
            runner.train()
        with pytest.raises(StrategyError, match="in the middle of an update"):
            runner.train()
    finally:
        runner.strategy.leave()


class Sizes(nn.Module):
    """Predicts how many samples there are, and raises KeyboardInterrupt in its second pass."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(1, 1)
        self.passes = 0

    def forward(self, index: Tensor, x: Tensor, y: Tensor, mode: str = "tensor") -> list[Tensor]:
        self.passes += 1
        if self.passes == 2:
            raise KeyboardInterrupt
        return [torch.ones(len(index))]


class Count(BaseMetric):
    """How many samples it was given."""

    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results.append(float(data_samples[0].sum()))

    def compute_metrics(self, results: list[Any]) -> dict[str, Any]:
        return {"count": sum(results)}


@pytest.mark.parametrize(("metric", "name"), [(Count, "count"), ("SumMetric", "SumMetric")])
def test_an_evaluation_that_was_interrupted_counts_nothing_twice(tmp_path: Path, metric: Any, name: str) -> None:
    pytest.importorskip("torchmetrics")
    runner = make_runner(tmp_path, model=Sizes, **{**validation(10), "val_evaluator": dict(type=metric)})
    with pytest.raises(KeyboardInterrupt):
        runner.val()
    assert runner.val() == {name: 10.0}


class Dropping(SingleDeviceStrategy):
    """Counts."""

    dropped = 0

    def abort_update(self) -> None:
        super().abort_update()
        self.dropped += 1


def test_gradients_are_dropped_once_and_only_then(tmp_path: Path) -> None:
    strategy = Dropping()
    runner = trained(tmp_path, in_forward, strategy=strategy)
    assert strategy.dropped == 1
    runner.train()
    assert strategy.dropped == 1


def test_an_exception_in_a_hook_behind_an_update_leaves_nothing_to_drop_and_no_number_comes_twice(
    tmp_path: Path,
) -> None:
    strategy = Dropping()
    runner = make_runner(tmp_path, strategy=strategy, custom_hooks=[StopAt(2)])  # which would stop again at a second 2
    with pytest.raises(Stop):
        runner.train()
    assert runner.iter == 1
    runner.train()
    assert not strategy.dropped
    assert runner.iter == 21
