"""Classes written for MMEngine's runner, given to flextrain's own: one line says what to write instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import flextrain
from flextrain import ConfigError

from .training import SGD, Accuracy, make_runner, refuses, validation

pytest.importorskip("mmengine")

from mmengine.config import ConfigDict
from mmengine.evaluator import BaseMetric
from mmengine.hooks import EMAHook, Hook
from mmengine.model import BaseModel
from mmengine.optim import DefaultOptimWrapperConstructor, LinearLR, OptimWrapper
from mmengine.runner import EpochBasedTrainLoop, ValLoop

BRIDGE = "a project that keeps MMEngine imports FlexibleRunner from flextrain.mmengine"


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
    with refuses(ConfigError, exactly=message):
        make_runner(tmp_path, **changes)


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


FOREIGN: list[dict[str, Any]] = [
    dict(custom_hooks=[TheirHook()]),
    with_metric(dict(type=TheirMetric)),
    dict(model=TheirModel),
    dict(model=TheirModel()),
]


@pytest.mark.parametrize("changes", FOREIGN, ids=["hook", "metric", "model class", "model"])
@pytest.mark.parametrize("adapted_first", [True, False], ids=["adapted first", "native first"])
def test_each_runner_decides_for_itself(tmp_path: Path, changes: dict[str, Any], adapted_first: bool) -> None:
    def refused() -> None:
        with pytest.raises(ConfigError, match="is made for MMEngine's runner"):
            make_runner(tmp_path / "native", **changes)

    if not adapted_first:
        refused()
    from flextrain.mmengine import FlexibleRunner as Adapted

    given = {key: value for key, value in changes.items() if key != "model"}
    Adapted(model=changes.get("model", nn.Linear(1, 1)), work_dir=tmp_path / "adapted", **given)
    refused()


def test_a_native_runner_inside_an_adapted_one_refuses(tmp_path: Path) -> None:
    from flextrain.mmengine import FlexibleRunner as Adapted

    class Nested(Hook):
        def __init__(self) -> None:
            make_runner(tmp_path / "native", model=TheirModel())

    with pytest.raises(ConfigError, match="^model: TheirModel is made for MMEngine's runner"):
        Adapted(model=TheirModel(), work_dir=tmp_path / "adapted", custom_hooks=[dict(type=Nested)])


def test_the_adapted_runner_finds_import_paths(tmp_path: Path) -> None:
    from flextrain.mmengine import FlexibleRunner as Adapted

    here = f"{__name__}:"
    metric = dict(type=f"{here}TheirMetric")
    runner = Adapted(
        model=dict(type=f"{here}TheirModel"),
        work_dir=tmp_path,
        custom_hooks=[dict(type=f"{here}TheirHook"), dict(type="mmengine.hooks:EMAHook")],
        **with_metric(metric),
    )
    names = [type(getattr(hook, "hook", hook)).__module__ for hook in runner.hooks]
    assert __name__ in names
    assert "flextrain.runner.hooks.ema" in names
    with pytest.raises(ConfigError, match=r"^custom_hooks\[0\]"):
        Adapted(model=nn.Linear(1, 1), work_dir=tmp_path, custom_hooks=[dict(type="mmengine.hooks:Nothing")])


def test_the_adapted_runner_takes_the_place_of_mmengines_strategies(tmp_path: Path) -> None:
    from mmengine._strategy import SingleDeviceStrategy

    from flextrain.mmengine import FlexibleRunner as Adapted

    runner = Adapted(model=nn.Linear(1, 1), work_dir=tmp_path, strategy=SingleDeviceStrategy)
    assert type(runner.strategy) is flextrain.SingleDeviceStrategy
    with pytest.raises(ConfigError, match="^strategy: MMEngine's SingleDeviceStrategy is built already, give dict"):
        Adapted(model=nn.Linear(1, 1), work_dir=tmp_path, strategy=SingleDeviceStrategy(work_dir=str(tmp_path)))
