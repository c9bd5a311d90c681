"""MMEngine's build_... methods of a runner, for loops and hooks of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flextrain import (
    AmpOptimWrapper,
    ConfigError,
    FlexibleRunner,
    OptimWrapper,
    OptimWrapperDict,
    SingleDeviceStrategy,
    StrategyError,
)
from flextrain.optim.schedulers import MultiStepLR
from flextrain.runner.loops.train import EvalConfig, TrainConfig

from .training import SGD, At, make_runner, refuses, validation

pytestmark = pytest.mark.usefixtures("quick")
STEPS = dict(type="MultiStepLR", milestones=[1])


def test_an_optimizer_of_ones_own_trains_the_model(tmp_path: Path) -> None:
    runner = make_runner(tmp_path)
    built = runner.build_optim_wrapper(dict(type="AmpOptimWrapper", dtype="bfloat16", optimizer=SGD))
    assert isinstance(built, AmpOptimWrapper)
    assert built is not runner.optim_wrapper
    weight = next(runner.model.parameters())
    before = weight.detach().clone()
    with built.optim_context(runner.model):
        loss = weight.square().sum() + 1
    built.update_params(loss)
    assert not torch.equal(weight, before)
    other = nn.Linear(1, 1)
    given = torch.optim.SGD(other.parameters(), lr=0.1)
    assert runner.build_optim_wrapper(given).optimizer is given  # as in MMEngine, of any parameters
    own = OptimWrapper(torch.optim.SGD(runner.model.parameters(), lr=0.1))
    several = runner.build_optim_wrapper(dict(net=dict(optimizer=SGD), mine=own))
    assert isinstance(several, OptimWrapperDict)


def test_the_loops_configurations_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    for kind in (TrainConfig, EvalConfig):
        own = kind.read
        monkeypatch.setattr(kind, "read", lambda *given, own=own: [read.append(own.__self__.__name__), own(*given)][1])
    runner = make_runner(tmp_path, **validation())
    runner.train()
    assert read == ["TrainConfig", "EvalConfig"]
    assert runner.build_train_loop(dict(max_epochs=7)).max_epochs == 7


def test_schedules_get_the_loops_length(tmp_path: Path) -> None:
    runner = make_runner(tmp_path)
    (built,) = runner.build_param_scheduler(dict(STEPS, convert_to_iter_based=True))
    assert isinstance(built, MultiStepLR)
    assert (built.by_epoch, built.end) == (False, runner.max_iters)
    runner.optim_wrapper = {"optimizer": SGD}  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="runner.optim_wrapper: is dict"):
        runner.build_param_scheduler(STEPS)


def test_learning_rates_are_scaled(tmp_path: Path) -> None:
    runner = make_runner(tmp_path)
    wrapper = runner.build_optim_wrapper(dict(optimizer=dict(type="SGD", lr=0.5)))
    runner.scale_lr(wrapper)
    runner.scale_lr(wrapper, dict(base_batch_size=1, enable=False))
    assert wrapper.param_groups[0]["lr"] == 0.5
    runner.scale_lr(wrapper, dict(base_batch_size=runner.train_dataloader.batch_size * 2))
    assert wrapper.param_groups[0]["lr"] == 0.25
    with pytest.raises(ConfigError, match="auto_scale_lr.base_batch_size"):
        runner.scale_lr(wrapper, dict(enable=True))


def test_models(tmp_path: Path) -> None:
    runner = make_runner(tmp_path)
    assert isinstance(runner.build_model(dict(type=nn.Linear, in_features=1, out_features=2)), nn.Linear)
    for wrong in ("no-such-model", 3):
        with pytest.raises(ConfigError, match="^model"):
            runner.build_model(wrong)


def test_an_engine_has_one_optimizer(tmp_path: Path) -> None:
    class Engine(SingleDeviceStrategy):
        def setup(self, model: nn.Module, optim: Any) -> tuple[nn.Module, Any]:
            model, optim = super().setup(model, optim)
            return model, type(optim)(optim.optimizer)

    runner = make_runner(tmp_path, strategy=Engine())
    with pytest.raises(StrategyError, match="build_optim_wrapper: Engine updates one optimizer"):
        runner.build_optim_wrapper(dict(optimizer=SGD))


class OnlyTrains(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def train_step(self, data: Any, optim_wrapper: OptimWrapper) -> dict[str, Any]:
        optim_wrapper.update_params(self.weight * 1)
        return {"loss": self.weight.detach()}


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_model_that_cannot_predict_is_told_before_training(tmp_path: Path, dry_run: bool) -> None:
    runner = make_runner(tmp_path, model=OnlyTrains(), env_cfg=dict(dry_run=dry_run), **validation())
    with refuses(ConfigError, matches="^model: OnlyTrains has neither forward nor val_step, evaluation needs"):
        runner.train()
    assert runner.iter == 0


def test_a_model_that_cannot_train(tmp_path: Path) -> None:
    class Nothing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(1, 1)

    runner: FlexibleRunner = make_runner(tmp_path, model=Nothing())
    with pytest.raises(ConfigError, match="^model: Nothing has neither forward nor train_step, training needs"):
        runner.train()


def test_the_optimizer_of_a_training_is_not_replaced(tmp_path: Path) -> None:
    """The loop went on with the one that it had, and checkpoints had the state of the other."""

    def replace(runner: FlexibleRunner, *_: Any, **__: Any) -> None:
        if runner.iter == 2:
            runner.optim_wrapper = runner.build_optim_wrapper(dict(optimizer=dict(type="SGD", lr=0.1)))

    runner = make_runner(tmp_path, custom_hooks=[At("after_train_iter", replace)])
    with pytest.raises(ConfigError, match=r"runner.optim_wrapper: cannot be replaced now, the training loop"):
        runner.train()
