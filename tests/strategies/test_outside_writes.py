"""Hooks that write to parameters between updates: what DeepSpeed's engine would lose raises, in one process and in several."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from flextrain import DeepSpeedStrategy, OptimWrapper
from flextrain.core.base.errors import StrategyError
from flextrain.core.model.base_model import run_forward
from flextrain.strategies.parts import full_weights
from flextrain.testing import WorkerGroup
from flextrain.testing.loop import train
from flextrain.testing.models import Mlp

pytestmark = [pytest.mark.distributed, pytest.mark.deepspeed]


@torch.no_grad()
def bound(model: nn.Module, update: int) -> None:
    for parameter in model.parameters():
        parameter.clamp_(-0.01, 0.01)


def bound_data(model: nn.Module, update: int) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.01, 0.01)


def bound_in_one_process(model: nn.Module, update: int) -> None:
    if os.environ["RANK"] == "1":
        bound_data(model, update)


def begin_anew(model: nn.Module, update: int) -> None:
    if update == 5:
        for part in model.modules():
            if isinstance(part, nn.Linear):
                part.reset_parameters()


def read(model: nn.Module, update: int) -> None:
    for parameter in model.parameters():
        parameter.detach().square().sum()


def write(
    stage: int, half: bool, way: Callable[[nn.Module, int], None], updates: int, saves: bool = False
) -> tuple[int, str]:
    """In a worker: how many updates were made, and the message of the error."""
    strategy = DeepSpeedStrategy(device="cpu", zero_optimization=dict(stage=stage), bf16=dict(enabled=half))
    made = 0

    def after() -> None:
        nonlocal made
        made += 1
        way(strategy.module, made)
        if saves:
            strategy.state()

    try:
        strategy.join()
        torch.manual_seed(0)
        model, optim = strategy.setup(Mlp(), OptimWrapper(dict(type="SGD", lr=0.1)))
        assert optim is not None
        windows: Any = [[Mlp.sample(4, seed)] for seed in range(updates)]
        train(strategy, model, optim, windows, (), after)  # type: ignore[arg-type]
    except StrategyError as error:
        return made, str(error)
    finally:
        strategy.leave()
    return made, ""


@pytest.mark.parametrize("stage, half", [(1, False), (2, False), (3, False), (0, True), (2, True), (3, True)])
def test_writes_between_updates(workers2: WorkerGroup, stage: int, half: bool) -> None:
    for way in (bound, bound_data, bound_in_one_process):
        for made, message in workers2.run(write, stage, half, way, 3):
            assert (made, "was written to between updates, which DeepSpeed's engine would lose" in message) == (1, True)
    for made, message in workers2.run(write, stage, half, begin_anew, 7):
        assert (made, message[:6]) == (5, "model.")


def test_writes_before_a_save(workers2: WorkerGroup) -> None:
    for made, message in workers2.run(write, 1, False, bound, 1, True):
        assert (made, message[:6]) == (1, "model.")


@pytest.mark.parametrize("stage, half, way", [(0, False, bound), (1, True, read), (3, False, read)])
def test_what_is_not_lost(workers2: WorkerGroup, stage: int, half: bool, way: Callable[[nn.Module, int], None]) -> None:
    for made, message in workers2.run(write, stage, half, way, 5):
        assert (made, message) == (5, "")


def differentiate(stage: int, beside: bool) -> tuple[str, float]:
    """In a worker: what a backward between updates raises, and the sum of all weights after one more update."""
    strategy = DeepSpeedStrategy(device="cpu", zero_optimization=dict(stage=stage))
    said = ""
    try:
        strategy.join()
        torch.manual_seed(0)
        model, optim = strategy.setup(Mlp(), OptimWrapper(dict(type="SGD", lr=0.1)))
        assert optim is not None

        def between() -> None:
            nonlocal said
            try:
                if beside:
                    run_forward(model, Mlp.sample(4, 9), mode="loss")["loss"].backward()
                    assert strategy.module.temperature.grad.abs() > 0
                    strategy.module.zero_grad()
            except StrategyError as error:
                said = str(error)

        train(strategy, model, optim, [[Mlp.sample(4, seed)] for seed in range(2)], (), between)  # type: ignore[arg-type]
        with full_weights(strategy) as copy:
            return said, sum(float(parameter.detach().double().sum()) for parameter in copy.parameters())
    finally:
        strategy.leave()


def test_a_backward_beside_training_changes_no_update_or_is_refused(workers2: WorkerGroup) -> None:
    assert workers2.run(differentiate, 1, True) == workers2.run(differentiate, 1, False)
    for stage in (2, 3):
        for said, _ in workers2.run(differentiate, stage, True):
            assert said.startswith("model: backward was called beside the optimizer wrapper")
