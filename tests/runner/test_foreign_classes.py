"""Classes written for MMEngine's runner, given to flextrain's own: one line says what to write instead."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flextrain import ConfigError

from .training import SGD, Accuracy, make_runner, validation

pytest.importorskip("mmengine")

from mmengine.config import ConfigDict
from mmengine.evaluator import BaseMetric
from mmengine.hooks import EMAHook, Hook
from mmengine.model import BaseModel
from mmengine.optim import DefaultOptimWrapperConstructor, LinearLR, OptimWrapper
from mmengine.runner import EpochBasedTrainLoop, ValLoop

BRIDGE = "a project that keeps MMEngine imports FlexibleRunner from flextrain.mmengine"


@pytest.fixture(autouse=True)
def _without_bridge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of the session may have imported it."""
    monkeypatch.delitem(sys.modules, "flextrain.mmengine.adapted_runner", raising=False)


class TheirHook(Hook):
    pass


class LooksLikeAHook:
    def after_train_iter(self, runner: Any) -> None:
        pass


class TheirMetric(BaseMetric):
    def process(self, data_batch: Any, data_samples: Any) -> None:
        pass

    def compute_metrics(self, results: list[Any]) -> dict[str, Any]:
        return {}


class LooksLikeAMetric:
    def process(self, data_batch: Any, data_samples: Any) -> None:
        pass


class TheirModel(BaseModel):
    def forward(self, *args: Any, mode: str = "tensor", **kwargs: Any) -> Any:
        return None


class TheirConstructor(DefaultOptimWrapperConstructor):
    pass


def with_metric(metric: Any) -> dict[str, Any]:
    return {**validation(4), "val_evaluator": metric}


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (lambda: dict(custom_hooks=[TheirHook()]), "custom_hooks[0]: TheirHook is made for MMEngine's runner, subclass flextrain.Hook; "),
        (lambda: dict(custom_hooks=[TheirHook]), "custom_hooks[0]: TheirHook is made for MMEngine's runner, subclass flextrain.Hook; "),
        (lambda: dict(custom_hooks=[dict(type=TheirHook)]), "custom_hooks[0]: TheirHook is made for MMEngine's runner, subclass"),
        (lambda: dict(custom_hooks=[dict(type="mmengine.hooks.EMAHook")]), "custom_hooks[0]: EMAHook is made for MMEngine's runner, give type=\"EMAHook\", which is flextrain's; "),
        (lambda: dict(default_hooks=dict(mine=TheirHook())), "default_hooks.mine: TheirHook is made for MMEngine's runner, subclass"),
        (lambda: with_metric(TheirMetric()), "val_evaluator: TheirMetric is made for MMEngine's runner, subclass flextrain.BaseMetric; "),
        (lambda: with_metric([dict(type=TheirMetric)]), "val_evaluator[0]: TheirMetric is made for MMEngine's runner, subclass flextrain.BaseMetric; "),
        (lambda: dict(model=TheirModel()), "model: TheirModel is made for MMEngine's runner, subclass flextrain.BaseModel; "),
        (lambda: dict(model=TheirModel), "model: TheirModel is made for MMEngine's runner, subclass flextrain.BaseModel; "),
        (lambda: dict(model=dict(type=TheirModel)), "model: TheirModel is made for MMEngine's runner, subclass flextrain.BaseModel; "),
        (lambda: dict(optim_wrapper=OptimWrapper(sgd())), "optim_wrapper: OptimWrapper is made for MMEngine's runner, give type=\"OptimWrapper\", which is"),
        (lambda: dict(optim_wrapper=dict(type="mmengine.optim.AmpOptimWrapper", optimizer=SGD)), "optim_wrapper: AmpOptimWrapper is made for MMEngine's"),
        (lambda: dict(optim_wrapper=dict(optimizer=SGD, constructor=TheirConstructor)), "optim_wrapper.constructor: TheirConstructor is made for MMEngine's runner, subclass flextrain.DefaultOptimWrapperConstructor; "),
        (lambda: dict(param_scheduler=dict(type=LinearLR)), "param_scheduler.type: LinearLR is made for MMEngine's runner, give type=\"LinearLR\""),
        (lambda: dict(param_scheduler=LinearLR(sgd(), 0.1)), "param_scheduler: LinearLR is made for MMEngine's runner, give type=\"LinearLR\""),
        (lambda: dict(train_cfg=dict(type=EpochBasedTrainLoop, max_epochs=1)), "train_cfg.type: EpochBasedTrainLoop is made for MMEngine's runner, give"),
        (lambda: {**validation(4), "val_cfg": dict(type=ValLoop)}, "val_cfg.type: ValLoop is made for MMEngine's runner, give"),
        (lambda: dict(strategy=dict(type="mmengine._strategy.DDPStrategy")), "strategy: DDPStrategy is made for MMEngine's runner, give type=\"DDPStrategy\""),
    ],
)  # fmt: skip
def test_mmengines_classes(tmp_path: Path, changes: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_runner(tmp_path, **changes())
    assert str(caught.value).startswith(message)
    assert str(caught.value).endswith(BRIDGE)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(custom_hooks=[LooksLikeAHook()]), "custom_hooks[0]: LooksLikeAHook is no Hook, subclass flextrain.Hook"),
        (
            dict(custom_hooks=[LooksLikeAHook]),
            "custom_hooks[0].type: LooksLikeAHook is no Hook, subclass flextrain.Hook",
        ),
        (
            with_metric(LooksLikeAMetric()),
            "val_evaluator: LooksLikeAMetric is no metric, subclass flextrain.BaseMetric",
        ),
        (
            with_metric(LooksLikeAMetric),
            "val_evaluator.type: LooksLikeAMetric is no metric, subclass flextrain.BaseMetric",
        ),
    ],
)
def test_anybodys_classes(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_runner(tmp_path, **changes)
    assert str(caught.value) == message


def test_flextrains_names_stay(tmp_path: Path) -> None:
    assert EMAHook.__name__ == "EMAHook"
    make_runner(tmp_path, custom_hooks=[dict(type="EMAHook")])


def test_configurations_in_mmengines_dicts_are_taken(tmp_path: Path) -> None:
    """A script may go on reading its configuration with MMEngine."""
    cfg = ConfigDict(
        optim_wrapper=dict(optimizer=SGD),
        param_scheduler=[dict(type="LinearLR", start_factor=0.5, end=2)],
        custom_hooks=[dict(type="EMAHook")],
        default_hooks=dict(logger=dict(type="LoggerHook", interval=1)),
        train_cfg=dict(by_epoch=True, max_epochs=1),
        val_evaluator=dict(type=Accuracy),
    )
    runner = make_runner(tmp_path, **{**validation(4), **cfg})
    runner.train()
    assert runner.iter == 7
    scheduler = make_runner(tmp_path / "one", param_scheduler=cfg.param_scheduler[0]).cfg["param_scheduler"]
    assert scheduler.start_factor == 0.5
