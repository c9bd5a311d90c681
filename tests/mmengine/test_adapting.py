"""What MMEngine's objects and names become, one by one, and what is refused by name."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from mmengine.config import Config, ConfigDict
from mmengine.evaluator import BaseMetric
from mmengine.hooks import Hook
from mmengine.logging import HistoryBuffer, MessageHub, MMLogger, print_log
from mmengine.model import BaseModel, BaseModule, ExponentialMovingAverage
from mmengine.registry import HOOKS, METRICS, MODELS, DefaultScope
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop, LogProcessor
from mmengine.visualization import Visualizer
from torch import nn
from torch.nn import functional
from torch.utils.data import BatchSampler

from flextrain import ConfigError
from flextrain.mmengine import FlexibleRunner
from flextrain.report.recorded_run import recorded_run
from flextrain.report.run_facts import facts_of
from flextrain.testing import WorkerGroup

from .digits import configuration, train


class Net(BaseModel):
    def __init__(self, width: int = 4, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.net = nn.Linear(3, width)

    def forward(self, inputs: Any, data_samples: Any = None, mode: str = "tensor") -> Any:
        x = torch.stack(inputs) if isinstance(inputs, list) else inputs
        logits = self.net(x)
        if mode == "loss":
            return {"loss": functional.mse_loss(logits, torch.zeros_like(logits))}
        return list(logits)


class Mean(BaseMetric):
    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results += [float(sample.mean()) for sample in data_samples]

    def compute_metrics(self, results: list[Any]) -> dict[str, float]:
        return {"mean": sum(results) / len(results)}


def samples(count: int = 8) -> list[dict[str, Any]]:
    return [dict(inputs=torch.full((3,), float(i))) for i in range(count)]


def arguments(folder: Path, **changes: Any) -> dict[str, Any]:
    given = dict(
        model=Net(),
        work_dir=str(folder),
        train_dataloader=dict(batch_size=2, dataset=samples()),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
        train_cfg=dict(by_epoch=True, max_epochs=1),
        default_hooks=dict(checkpoint=None),
        log_level="WARNING",
    )
    return {key: value for key, value in {**given, **changes}.items() if value is not None}


def validation(**changes: Any) -> dict[str, Any]:
    given = dict(
        val_dataloader=dict(batch_size=2, dataset=samples(5)), val_cfg=dict(), val_evaluator=dict(type=Mean, prefix="a")
    )
    return {**given, **changes}


# Configurations


@pytest.mark.parametrize(("enable", "lr"), [(dict(), 0.1), (dict(enable=True), 0.05)])
def test_learning_rates_are_scaled_only_on_request(tmp_path: Path, enable: dict[str, Any], lr: float) -> None:
    runner = FlexibleRunner(**arguments(tmp_path, auto_scale_lr=dict(base_batch_size=4, **enable)))
    runner.train()
    assert runner.optim_wrapper.get_lr()["lr"] == [pytest.approx(lr)]


def test_the_switch_for_scaling_does_not_matter_without_training(tmp_path: Path) -> None:
    given = arguments(tmp_path, train_dataloader=None, optim_wrapper=None, train_cfg=None)
    test = {key.replace("val_", "test_", 1): value for key, value in validation().items()}
    runner = FlexibleRunner(**given, **test, auto_scale_lr=dict(base_batch_size=4, enable=False))
    assert runner.test().keys() == {"a/mean"}


def test_extra_names_are_kept_and_reachable(tmp_path: Path) -> None:
    cfg = configuration(tmp_path, backend=dict(args=[1, 2]), num_classes=3)
    runner = FlexibleRunner.from_cfg(cfg)
    assert runner.cfg.num_classes == 3
    assert runner.cfg.backend.args == [1, 2]
    assert runner.cfg.get("nothing", 5) == 5
    assert isinstance(runner.cfg, Config)
    assert Config.fromfile(next(tmp_path.glob("*.py"))).num_classes == 3


@pytest.mark.parametrize("name, meant", [("custom_hook", "custom_hooks"), ("train_dataloaders", "train_dataloader")])
def test_names_near_an_argument_raise(tmp_path: Path, name: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f'^{name}: unknown key, did you mean "{meant}"'):
        FlexibleRunner.from_cfg(ConfigDict(work_dir=str(tmp_path), model=dict(type=Net), **{name: []}))


def test_a_configuration_with_objects_is_not_written(tmp_path: Path) -> None:
    runner = FlexibleRunner.from_cfg(dict(arguments(tmp_path, log_level="INFO"), num_classes=3))
    runner.train()
    assert runner.cfg.num_classes == 3
    assert list(tmp_path.glob("*.py")) == []
    assert "holds objects" in next(tmp_path.glob("*/*.log")).read_text()


def test_a_runner_without_a_configuration_has_one_for_the_record(tmp_path: Path) -> None:
    assert FlexibleRunner(**arguments(tmp_path)).cfg.train_cfg.max_epochs == 1


def test_names_are_found_in_scopes_and_parents(tmp_path: Path) -> None:
    runner = FlexibleRunner.from_cfg(configuration(tmp_path))
    assert type(runner.model).__name__ == "Classifier"
    assert type(runner.model.data_preprocessor).__module__.startswith("mmengine.")
    assert runner.default_scope == "mm_digits"
    current = DefaultScope.get_current_instance()
    assert current is not None
    assert current.scope_name == "mm_digits"


def test_a_scope_of_one_part(tmp_path: Path) -> None:
    configuration(tmp_path)  # the project can be imported from here on
    head = dict(type="Head", channels=8, _scope_="mm_digits")
    runner = FlexibleRunner(model=head, work_dir=str(tmp_path))
    assert type(runner.model).__name__ == "Head"


def test_parts_inherited_from_another_project(tmp_path: Path) -> None:
    """MMEngine writes the scope into all parts of ``_base_ = "mm_digits::..."``, and into every dict that is read there."""
    cfg = configuration(tmp_path, default_scope="mmengine", log_processor=dict(type="LogProcessor"))
    cfg.optim_wrapper.constructor = "mm_digits.LayerDecay"  # names alone, which have no scope
    cfg.custom_hooks[0].ema_type = "mm_digits.SlowingAverage"
    inherited = Config._dict_to_config_dict(cfg._cfg_dict, "mm_digits")
    Config._parse_scope(inherited.train_dataloader)
    runner = FlexibleRunner.from_cfg(Config(inherited))
    assert inherited.param_scheduler[0]._scope_ == inherited.train_dataloader._scope_ == "mm_digits"
    runner.train()
    assert runner.iter == 12


_INNER = "val_dataloader.dataset.datasets.1.pipeline"


def test_an_unknown_name_raises(tmp_path: Path) -> None:
    for changes, message in [
        ({"model.type": "Clasifier"}, 'model.type: "Clasifier" is no known model, did you mean "Classifier"'),
        ({"model.type": "mm_digits.Clasifier"}, 'model.type: .* did you mean "mm_digits.Classifier"'),
        (
            {"default_scope": "mmengine"},
            # Which is looked up first depends on the scope that was the default before.
            '(model|default_hooks.drawing).type: .* did you mean "mm_digits.(Classifier|DrawDigits)"',
        ),
        ({"train_dataloader.dataset.type": "RepeatDatset"}, 'dataset.type: "RepeatDatset" is .* "RepeatDataset"'),
        (
            {"val_evaluator": [dict(type="Acuracy")]},
            r'val_evaluator\[0\].type: "Acuracy" is no known metric, did you mean "Acc',
        ),
        ({"custom_hooks": [dict(type="Jurnal")]}, r'custom_hooks\[0\].type: "Jurnal" is .* did you mean "Journal"'),
        ({_INNER: [dict(type="PackDigt")]}, r'pipeline\[0\].type: "PackDigt" is no known transform, .* "PackDigit"'),
        ({_INNER: [dict(type="PackDigit", meta_key=1)]}, r'pipeline\[0\].meta_key: unknown key, .* "meta_keys"'),
        ({"optim_wrapper.optimizer.lrr": 1}, 'optim_wrapper.optimizer.lrr: unknown key, did you mean "lr"'),
        # As a file that is inherited from another project has it.
        (
            {"optim_wrapper.optimizer": dict(type="SGD", lr=1, momemtum=0.9, _scope_="mm_digits")},
            'optim_wrapper.optimizer.momemtum: unknown key, did you mean "momentum"',
        ),
    ]:
        with pytest.raises(ConfigError, match=message):
            FlexibleRunner.from_cfg(configuration(tmp_path, **changes))
    with pytest.raises(ConfigError, match='model.bakbone: unknown key, did you mean "backbone"'):
        FlexibleRunner.from_cfg(configuration(tmp_path, **{"model.bakbone": 1}))


def test_classes_in_place_of_names(tmp_path: Path) -> None:
    from mmengine.dataset import DefaultSampler, default_collate
    from mmengine.hooks import CheckpointHook, EMAHook
    from mmengine.optim import CosineAnnealingLR, OptimWrapper
    from mmengine.runner import EpochBasedTrainLoop, LogProcessor, ValLoop
    from mmengine.visualization import LocalVisBackend
    from torch.optim import SGD

    runner = FlexibleRunner(
        **arguments(
            tmp_path,
            train_dataloader=dict(
                batch_size=2,
                dataset=samples(),
                sampler=dict(type=DefaultSampler, shuffle=True),
                collate_fn=dict(type=default_collate),
            ),
            optim_wrapper=dict(type=OptimWrapper, optimizer=dict(type=SGD, lr=0.1)),
            param_scheduler=dict(type=CosineAnnealingLR, T_max=1),
            train_cfg=dict(type=EpochBasedTrainLoop, max_epochs=1),
            default_hooks=dict(checkpoint=dict(type=CheckpointHook, interval=1)),
            custom_hooks=[dict(type=EMAHook)],
            log_processor=dict(type=LogProcessor, window_size=3),
            visualizer=dict(type=Visualizer, vis_backends=[dict(type=LocalVisBackend)]),
            **validation(val_cfg=dict(type=ValLoop)),
        )
    )
    runner.train()
    assert (tmp_path / "epoch_1").is_dir()
    assert runner.log_processor.window_size == 3
    facts = facts_of(recorded_run(tmp_path, "run"))
    assert facts["strategy"] == "SingleDeviceStrategy on 1 process"
    assert facts["batch"] == "2 samples per update"
    assert facts["state"] == "finished"
    assert "time" in facts


# Models


class Part(BaseModule):
    def __init__(self, init_cfg: Any = None) -> None:
        super().__init__(init_cfg)
        self.fc = nn.Linear(3, 3)


def test_pretrained_parts_are_loaded(tmp_path: Path) -> None:
    weights = {"fc.weight": torch.full((3, 3), 0.25), "fc.bias": torch.ones(3)}
    torch.save(weights, tmp_path / "part.pth")

    class Whole(Net):
        def __init__(self) -> None:
            super().__init__(init_cfg=dict(type="Constant", layer="Linear", val=2.0))
            self.part = Part(dict(type="Pretrained", checkpoint=str(tmp_path / "part.pth")))

    model = FlexibleRunner(**arguments(tmp_path, model=Whole)).model
    assert bool((model.net.weight == 2).all())
    assert bool((model.part.fc.weight == 0.25).all())


def test_models_are_not_initialised_for_evaluation(tmp_path: Path) -> None:
    net = Net(init_cfg=dict(type="Constant", layer="Linear", val=2.0))
    before = net.net.weight.clone()
    runner = FlexibleRunner(model=net, work_dir=str(tmp_path), **validation())
    assert torch.equal(runner.model.net.weight, before)


def test_overridden_steps_are_called_and_others_are_not(tmp_path: Path) -> None:
    called = []

    class Own(Net):
        def train_step(self, data: Any, optim_wrapper: Any) -> Any:
            called.append("train_step")
            return super().train_step(data, optim_wrapper)

        def val_step(self, data: Any) -> Any:
            called.append("val_step")
            return super().val_step(data)

    FlexibleRunner(**arguments(tmp_path, model=Own(), **validation(), env_cfg=dict(dry_run=False))).train()
    assert called == ["train_step"] * 4 + ["val_step"] * 3
    runner = FlexibleRunner(**arguments(tmp_path / "other"))
    assert not runner.stepper.custom_train


def test_the_data_preprocessor_moves_data_to_the_device() -> None:
    from flextrain.mmengine.adapted_runner import use_device

    net = nn.Sequential(Net(data_preprocessor=dict(type="ImgDataPreprocessor", mean=[1.0], std=[1.0])))
    use_device(net, torch.device("meta"))
    preprocessor = net[0].data_preprocessor
    assert preprocessor.device == torch.device("meta")
    assert preprocessor.cast_data([torch.ones(2)])[0].is_meta


# Metrics


class Size(BaseMetric):
    """Defines how it is evaluated, as some metrics of projects do."""

    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results += [0] * len(data_samples)

    def compute_metrics(self, results: list[Any]) -> dict[str, float]:
        return {"count": len(results)}

    def evaluate(self, size: int) -> Any:
        from mmengine.dist import get_world_size

        return {**super().evaluate(size), "size": size, "world": get_world_size()}


def test_metrics_of_three_kinds_together(tmp_path: Path) -> None:
    from flextrain import BaseMetric as OurMetric

    class Ours(OurMetric):
        def process(self, data_batch: Any, data_samples: Any) -> None:
            self.results += [1] * len(data_samples)

        def compute_metrics(self, results: list[Any]) -> dict[str, float]:
            return {"ours": len(results)}

    metrics = [dict(type=Mean, prefix="a"), Size(), dict(type=Ours)]
    runner = FlexibleRunner(model=Net(), work_dir=str(tmp_path), **validation(val_evaluator=metrics))
    found = runner.val()
    assert found.pop("a/mean") is not None
    assert found == {"ours": 5, "count": 5, "size": 5, "world": 1}
    assert runner.val()["count"] == 5  # nothing stays from the first time


def test_two_metrics_of_one_name_raise(tmp_path: Path) -> None:
    runner = FlexibleRunner(
        model=Net(), work_dir=str(tmp_path), **validation(val_evaluator=[dict(type=Mean), dict(type=Mean)])
    )
    with pytest.raises(ValueError, match="mean"):
        runner.val()


class Failing(Mean):
    def compute_metrics(self, results: list[Any]) -> dict[str, float]:
        raise ZeroDivisionError("no results")


def evaluate(folder: str, metrics: list[Any], count: int) -> Any:
    given = validation(val_evaluator=metrics, val_dataloader=dict(batch_size=2, dataset=samples(count)))
    runner = FlexibleRunner(model=dict(type=Net), work_dir=folder, **given)
    try:
        return runner.val()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        runner.strategy.leave()


@pytest.mark.distributed
@pytest.mark.parametrize("count", [7, 8, 1])
def test_every_sample_counts_once_on_two_processes(tmp_path: Path, workers2: WorkerGroup, count: int) -> None:
    results = workers2.run(evaluate, str(tmp_path), [dict(type=Size)], count)
    assert results == [dict(count=count, size=count, world=1)] * 2


@pytest.mark.distributed
def test_a_failing_metric_fails_on_all_processes(tmp_path: Path, workers2: WorkerGroup) -> None:
    first, second = workers2.run(evaluate, str(tmp_path), [dict(type=Failing)], 4)
    assert first == "ZeroDivisionError: no results"
    assert second == "FlexTrainError: Evaluator.evaluate on rank 0: ZeroDivisionError('no results')"


# Hooks


class Points(Hook):
    """Notes the hook points that are called; group forms for all modes."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def before_run(self, runner: Any) -> None:
        self.called.append("run")

    def _before_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, mode: str = "train") -> None:
        self.called.append(f"{mode}_iter")

    def _after_epoch(self, runner: Any, mode: str = "train") -> None:
        self.called.append(f"{mode}_epoch")


def test_hook_points_and_group_forms(tmp_path: Path) -> None:
    hook = Points()
    given = arguments(tmp_path, custom_hooks=[hook], train_dataloader=dict(batch_size=4, dataset=samples()))
    FlexibleRunner(**given, **validation(val_dataloader=dict(batch_size=5, dataset=samples(5)))).train()
    assert hook.called == ["run", "train_iter", "train_iter", "train_epoch", "val_iter", "val_epoch"]


class ByName(Hook):
    """Takes what hook points get by its name, as with MMEngine's runner."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def after_train_iter(self, runner: Any, **kwargs: Any) -> None:
        self.seen.append((sorted(kwargs), kwargs["batch_idx"]))

    def after_val_epoch(self, runner: Any, **kwargs: Any) -> None:
        self.seen.append(sorted(kwargs["metrics"]))


def test_hook_points_that_take_only_names(tmp_path: Path) -> None:
    hook = ByName()
    given = arguments(tmp_path, custom_hooks=[hook], train_dataloader=dict(batch_size=8, dataset=samples()))
    FlexibleRunner(**given, **validation()).train()
    assert hook.seen == [(["batch_idx", "data_batch", "outputs"], 0), ["a/mean"]]


def test_misspelled_hook_points_are_refused(tmp_path: Path) -> None:
    class Misspelled(Hook):
        def after_train_itr(self, runner: Any) -> None: ...

    with pytest.raises(
        ConfigError, match=r'custom_hooks\[0\]: Misspelled.after_train_itr .* did you mean "after_train_iter"'
    ):
        FlexibleRunner(**arguments(tmp_path, custom_hooks=[Misspelled()]))


def test_hooks_run_in_the_order_of_their_priorities(tmp_path: Path) -> None:
    order: list[str] = []

    class First(Hook):
        priority = "HIGHEST"

        def before_train(self, runner: Any) -> None:
            order.append("first")

    class Last(Hook):
        def before_train(self, runner: Any) -> None:
            order.append("last")

    class AfterMost(Hook):
        priority = "VERY_LOW"

        def before_train(self, runner: Any) -> None:
            order.append("after")

    class Before(Hook):
        def before_train(self, runner: Any) -> None:
            order.append("before")

    hooks = [dict(type=AfterMost), dict(type=Before), dict(type=Last, priority=91)]
    runner = FlexibleRunner(**arguments(tmp_path, custom_hooks=hooks))
    runner.register_hook(First())
    runner.train()
    assert order == ["first", "before", "after", "last"]


class SyncNormHook(Hook):
    """Has the name of mmdetection's, which cannot read parameters that are sharded."""

    __module__ = "mmdet.engine.hooks.sync_norm_hook"

    def before_val_epoch(self, runner: Any) -> None:
        raise AssertionError("flextrain has its own")


class Normalised(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, inputs: Any, data_samples: Any = None, mode: str = "tensor") -> Any:
        return super().forward(self.norm(torch.stack(inputs)), data_samples, mode)


def means_after_validation(folder: str, strategy: str) -> list[float]:
    in_order = dict(batch_size=2, dataset=samples(), sampler=dict(type="DefaultSampler", shuffle=False))
    given = arguments(
        Path(folder), model=Normalised(), train_dataloader=in_order, custom_hooks=[dict(type=SyncNormHook)]
    )
    runner = FlexibleRunner(**given, **validation(), strategy=dict(type=strategy))
    runner.train()
    found = runner.strategy.module.norm.running_mean.tolist()
    runner.strategy.leave()
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("strategy", ["DDPStrategy", "FSDPStrategy"])
def test_statistics_of_norms_become_means_before_validation(
    tmp_path: Path, workers2: WorkerGroup, strategy: str
) -> None:
    """As under MMEngine's runner, where each process has followed its own samples until then."""
    norms = [nn.BatchNorm1d(3), nn.BatchNorm1d(3)]
    for rank, norm in enumerate(norms):
        for first in (rank, rank + 4):
            norm(torch.tensor([[float(first)] * 3, [first + 2.0] * 3]))
    expected = torch.stack([norm.running_mean for norm in norms]).mean(0).tolist()
    for found in workers2.run(means_after_validation, str(tmp_path), strategy):
        assert found == pytest.approx(expected)


def test_hooks_read_the_run(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    class Reader(Hook):
        def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
            seen.update(
                iter=runner.iter,
                epoch=runner.epoch,
                max_iters=runner.max_iters,
                lr=runner.optim_wrapper.get_lr()["lr"],
                last=self.is_last_train_iter(runner),
                end=self.end_of_epoch(runner.train_dataloader, batch_idx),
                hub=runner.message_hub.get_scalar("train/lr").current(),
                model=runner.model_name,
                work_dir=runner.work_dir,
                inputs=len(data_batch["inputs"]),
                loss=float(outputs["loss"]),
                loops=[isinstance(runner.train_loop, kind) for kind in (EpochBasedTrainLoop, IterBasedTrainLoop)],
            )

    runner = FlexibleRunner(**arguments(tmp_path, custom_hooks=[Reader()]))
    runner.train()
    assert seen.pop("loss") > 0
    assert seen == dict(
        iter=3,
        epoch=0,
        max_iters=4,
        lr=[0.1],
        last=True,
        end=True,
        hub=0.1,
        model="Net",
        work_dir=str(tmp_path),
        inputs=2,
        loops=[True, False],
    )


# What code finds without being given it


def test_current_instances_are_those_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found: list[Any] = []

    class Looks(Net):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            hub = MessageHub.get_current_instance()
            found.append((hub.get_info("iter"), Visualizer.get_current_instance()))
            hub.update_scalar("train/seen", 3.0)
            hub.update_info("note", "x")
            print_log("from the model", logger="current", level=logging.WARNING)
            return super().forward(*args, **kwargs)

    runner = FlexibleRunner(**arguments(tmp_path / "a", model=Looks()))
    other = FlexibleRunner(**arguments(tmp_path / "b"))
    assert MMLogger.get_current_instance().instance_name == other.experiment_name
    runner.train()
    assert [iteration for iteration, _ in found] == [0, 1, 2, 3]
    assert all(visualizer is runner.visualizer.theirs for _, visualizer in found)
    assert runner.message_hub.get_scalar("train/seen").mean() == 3.0
    assert runner.message_hub.get_info("note") == "x"
    assert MessageHub.get_current_instance().instance_name == other.experiment_name
    assert isinstance(MessageHub.get_current_instance(), MessageHub)
    lines = [line for line in capsys.readouterr().out.splitlines() if "from the model" in line]
    assert len(lines) == 4
    assert all(" - flextrain - WARNING - " in line for line in lines)


def test_histories_have_the_statistics_that_projects_read(tmp_path: Path) -> None:
    runner = FlexibleRunner(**arguments(tmp_path))
    runner.train()
    hub = MessageHub.get_current_instance()
    ours, theirs = hub.get_scalar("train/loss"), HistoryBuffer()
    for value in ours.data[0]:
        theirs.update(float(value))
    for method in ("mean", "max", "min"):
        assert getattr(ours, method)(3) == pytest.approx(getattr(theirs, method)(3))
    assert ours.current() == pytest.approx(theirs.current())
    assert "train/loss" in hub.log_scalars
    assert hub.runtime_info["max_iters"] == 4


class Terse(LogProcessor):
    def get_log_after_iter(self, runner: Any, batch_idx: int, mode: str) -> Any:
        tag, line = super().get_log_after_iter(runner, batch_idx, mode)
        return tag, f"terse: {line}"


def test_log_processors_of_projects(tmp_path: Path) -> None:
    given = arguments(
        tmp_path,
        log_level="INFO",
        log_processor=dict(type=Terse, window_size=2),
        default_hooks=dict(checkpoint=None, logger=dict(interval=2)),
        **validation(),
    )
    FlexibleRunner(**given).train()
    lines = [line for line in next(tmp_path.glob("*/*.log")).read_text().splitlines() if "terse" in line]
    assert len(lines) == 3  # two of training, one of validation
    assert "Epoch(train) [1][4/4]" in lines[1]
    assert "loss:" in lines[1]
    assert "Epoch(val) [1][2/3]" in lines[2]


# Other ways to train


class Gan(BaseModel):
    """Two optimizers, updated as models of projects do it."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, inputs: Any, data_samples: Any = None, mode: str = "tensor") -> Any:
        return self.generator(torch.stack(inputs))

    def train_step(self, data: Any, optim_wrapper: Any) -> Any:
        inputs = self.data_preprocessor(data, True)["inputs"]
        with optim_wrapper["critic"].optim_context(self.critic):
            loss = self.critic(self(inputs).detach()).mean()
        optim_wrapper["critic"].update_params(loss)
        made, log = self.parse_losses({"loss_generator": self.critic(self(inputs)).square().mean()})
        optim_wrapper["generator"].update_params(made)
        return {**log, "loss_critic": loss}


def test_several_optimizers(tmp_path: Path) -> None:
    wrappers = dict(
        generator=dict(type="OptimWrapper", optimizer=dict(type="Adam", lr=0.1)),
        critic=dict(type="OptimWrapper", optimizer=dict(type="SGD", lr=0.2)),
    )
    schedules = dict(generator=[dict(type="ConstantLR", factor=0.5, by_epoch=False, end=2)])
    runner = FlexibleRunner(**arguments(tmp_path, model=Gan(), optim_wrapper=wrappers, param_scheduler=schedules))
    before = {name: value.clone() for name, value in runner.model.state_dict().items()}
    runner.train()
    assert all(not torch.equal(value, before[name]) for name, value in runner.model.state_dict().items())


class ByValue(BatchSampler):
    """Looks at the samples behind the sampler's indices, as those of projects do to put like with like."""

    def __iter__(self) -> Any:
        found: dict[bool, list[int]] = {False: [], True: []}
        for index in self.sampler:
            batch = found[float(self.sampler.dataset[index]["inputs"][0]) > 3]  # type: ignore[attr-defined]
            batch.append(index)
            if len(batch) == self.batch_size:
                yield batch[:]
                batch.clear()


def test_batch_samplers_look_at_the_samples(tmp_path: Path) -> None:
    loader = dict(batch_size=2, dataset=samples(), batch_sampler=dict(type=ByValue))
    seen: list[list[bool]] = []

    class Look(Hook):
        def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
            seen.append([bool(each[0] > 3) for each in data_batch["inputs"]])

    FlexibleRunner(**arguments(tmp_path, train_dataloader=loader, custom_hooks=[Look()])).train()
    assert sorted(seen) == [[False, False]] * 2 + [[True, True]] * 2


def test_training_by_iterations_with_an_endless_sampler(tmp_path: Path) -> None:
    from mmengine.dataset import InfiniteSampler

    for folder, kind in (("name", "InfiniteSampler"), ("class", InfiniteSampler)):
        runner = FlexibleRunner(
            **arguments(
                tmp_path / folder,
                train_dataloader=dict(batch_size=2, dataset=samples(), sampler=dict(type=kind)),
                train_cfg=dict(type="IterBasedTrainLoop", max_iters=7, val_interval=3),
                optim_wrapper=dict(type="AmpOptimWrapper", dtype="bfloat16", optimizer=dict(type="SGD", lr=0.1)),
                **validation(),
            )
        )
        runner.train()
        assert runner.iter == 7


def test_a_resumed_run_continues(tmp_path: Path) -> None:
    whole = train(str(tmp_path / "whole"), 16)
    train(str(tmp_path / "parts"), 16, **{"train_cfg.max_epochs": 2, "param_scheduler.1.end": 3})
    losses, _, metrics = train(str(tmp_path / "parts"), 16, resume=True)
    assert losses == whole[0][8:]
    assert metrics == whole[2]


def test_weights_of_mmengines_checkpoints_are_read(tmp_path: Path) -> None:
    from mmengine.runner import Runner

    theirs = Runner.from_cfg(configuration(tmp_path / "theirs", **{"visualizer.name": "saved"}))
    theirs.train()
    weights = {name: value.clone() for name, value in theirs.model.state_dict().items()}
    ours = FlexibleRunner.from_cfg(configuration(tmp_path / "ours", load_from=str(tmp_path / "theirs" / "epoch_3.pth")))
    ours.load_checkpoint(tmp_path / "theirs" / "epoch_3.pth")
    # MMEngine's EMAHook saves the averages in the place of the weights.
    found = ours.model.state_dict()
    assert found.keys() == weights.keys()
    assert not torch.equal(found["head.fc.weight"], weights["head.fc.weight"])
    assert float((found["head.fc.weight"] - weights["head.fc.weight"]).abs().max()) < 0.05


def test_configurations_in_python(tmp_path: Path) -> None:
    """MMEngine's newer style of configurations: classes are imported, and files read with ``read_base``."""
    configuration(tmp_path)  # the project can be imported from here on
    (tmp_path / "base.py").write_text(
        "from mmengine.dataset import DefaultSampler, pseudo_collate\n"
        "from mm_digits.datasets import Digits\n"
        "from mm_digits.transforms import PackDigit\n"
        "train_dataloader = dict(batch_size=4, sampler=dict(type=DefaultSampler, shuffle=True),\n"
        "    collate_fn=dict(type=pseudo_collate), dataset=dict(type=Digits, stop=8, pipeline=[dict(type=PackDigit)]))\n"
    )
    (tmp_path / "config.py").write_text(
        "from mmengine.config import read_base\n"
        "with read_base():\n    from .base import *\n"
        "from mmengine.model import ImgDataPreprocessor\n"
        "from mmengine.optim import OptimWrapper\n"
        "from mmengine.runner import EpochBasedTrainLoop\n"
        "from torch.optim import AdamW\n"
        "from mm_digits.models import Backbone, Classifier, Head\n"
        "import mm_digits.models as models\n"
        "model = dict(type=Classifier, data_preprocessor=dict(type=ImgDataPreprocessor, mean=[8.0], std=[5.0]),\n"
        "    backbone=dict(type=Backbone, channels=4), head=dict(type=Head, channels=4))\n"
        "optim_wrapper = dict(type=OptimWrapper, optimizer=dict(type=AdamW, lr=0.01))\n"
        "train_cfg = dict(type=EpochBasedTrainLoop, max_epochs=1)\n"
        "default_scope = 'mm_digits'\n"
    )
    cfg = Config.fromfile(str(tmp_path / "config.py"))
    cfg.work_dir = str(tmp_path / "run")
    runner = FlexibleRunner.from_cfg(cfg)
    runner.train()
    assert runner.iter == 2
    assert (tmp_path / "run" / "config.py").exists()


def test_built_parts_in_a_configuration_are_used_as_they_are(tmp_path: Path) -> None:
    net, data = Net(), torch.utils.data.Subset(samples(), range(4))  # type: ignore[arg-type]
    given = arguments(tmp_path, model=net, train_dataloader=dict(batch_size=2, dataset=data))
    runner = FlexibleRunner.from_cfg({**given, "extra": dict(a=[1])})
    runner.cfg.extra.a.append(2)
    assert runner.strategy is not None
    assert runner.model is net
    assert runner.train_dataloader.dataset is data
    assert given["train_dataloader"]["dataset"] is data


def test_a_configuration_is_not_changed(tmp_path: Path) -> None:
    cfg = configuration(tmp_path)
    before = cfg.pretty_text
    runner = FlexibleRunner.from_cfg(cfg)
    runner.train()
    assert cfg.pretty_text == before
    runner.cfg.project_name = "other"
    assert cfg.project_name == "digits"


def test_predictions_are_dumped_at_the_end_only(tmp_path: Path) -> None:
    import pickle

    target = tmp_path / "predictions.pkl"
    metrics = [dict(type="DumpResults", out_file_path=str(target)), dict(type=Mean)]
    written: list[bool] = []

    class Look(Hook):
        def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
            written.append(target.exists())

    runner = FlexibleRunner(**arguments(tmp_path, custom_hooks=[Look()]), **validation(val_evaluator=metrics))
    runner.train()
    assert written == [False] * 4
    with target.open("rb") as file:
        assert len(pickle.load(file)) == 5


def test_a_constructor_of_several_optimizers_is_refused(tmp_path: Path) -> None:
    from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS

    class Several:
        pass

    OPTIM_WRAPPER_CONSTRUCTORS.register_module(module=Several, force=True)
    wrappers = dict(
        constructor="Several",
        generator=dict(optimizer=dict(type="Adam", lr=0.1)),
        critic=dict(optimizer=dict(type="SGD", lr=0.2)),
    )
    with pytest.raises(ConfigError, match="optim_wrapper.constructor: Several makes several optimizers"):
        FlexibleRunner(**arguments(tmp_path, model=Gan(), optim_wrapper=wrappers))


# Refused by name


class Odd(ExponentialMovingAverage):
    def avg_func(self, averaged_param: Any, source_param: Any, steps: int) -> None:
        averaged_param.copy_(torch.maximum(averaged_param, source_param))


class OwnCheckpoints(HOOKS.get("CheckpointHook")):  # type: ignore[misc]
    pass


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            dict(custom_hooks=[dict(type=OwnCheckpoints)]),
            r"custom_hooks\[0\].type: OwnCheckpoints is a CheckpointHook of MMEngine, .* subclass flextrain.runner.hooks.Che",
        ),
        (
            dict(custom_hooks=[dict(type="EMAHook", ema_type=Odd)]),
            r"custom_hooks\[0\].ema_type: Odd.avg_func does not mix",
        ),
        (
            dict(custom_hooks=[dict(type="PrepareTTAHook", tta_cfg=dict(type="Nothing"))]),
            r'custom_hooks\[0\].tta_cfg.type: "Nothing" is no known model',
        ),
        (
            dict(custom_hooks=[dict(type="EmaHook")]),
            r'custom_hooks\[0\].type: "EmaHook" is no known hook, did you mean "EMAH',
        ),
        (dict(custom_hooks=[dict(type=Points, every=3)]), r"custom_hooks\[0\].every: unknown key"),
        (dict(val_evaluator=dict(type=Mean, prefx="x")), r'val_evaluator.prefx: unknown key, did you mean "prefix"'),
        (dict(visualizer=dict(type="Visualizer", backends=[])), r"visualizer.backends: unknown key"),
        (dict(strategy=dict(type="ColossalAIStrategy")), r"strategy.type: .*ColossalAIStrategy"),
        (dict(cfg=dict(model_wrapper_cfg=dict(type="X"))), r"cfg.model_wrapper_cfg: has no effect"),
    ],
)
def test_what_cannot_be_taken_says_so(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FlexibleRunner(**{**arguments(tmp_path), **validation(), **changes})
    assert "\n" not in message


def test_classes_on_top_of_mmengines_runner_are_refused(tmp_path: Path) -> None:
    from mmengine.optim import LinearLR, OptimWrapper
    from mmengine.runner import EpochBasedTrainLoop

    class OwnWrapper(OptimWrapper):
        pass

    class OwnLoop(EpochBasedTrainLoop):
        pass

    class OwnSchedule(LinearLR):
        def step(self) -> None: ...

    for changes, message in [
        (
            dict(optim_wrapper=dict(type=OwnWrapper, optimizer=dict(type="SGD", lr=1.0))),
            "optim_wrapper.type: OwnWrapper",
        ),
        (dict(train_cfg=dict(type=OwnLoop, max_epochs=1)), "train_cfg.type: OwnLoop is a loop of MMEngine"),
        (
            dict(param_scheduler=[dict(type=OwnSchedule)]),
            r"param_scheduler\[0\]: OwnSchedule is a scheduler of MMEngine",
        ),
    ]:
        with pytest.raises(ConfigError, match=message):
            FlexibleRunner(**arguments(tmp_path, **changes))


def test_import_flextrain_does_not_import_mmengine(tmp_path: Path) -> None:
    import flextrain

    assert MODELS is not flextrain.MODELS
    assert METRICS is not flextrain.METRICS
