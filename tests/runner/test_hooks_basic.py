"""The small hooks: runtime information, timing, sampler seeds, schedulers, buffers, memory, early stopping."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from flextrain import ConfigError, DDPStrategy, FlexibleRunner
from flextrain.core.base.errors import NonFiniteError
from flextrain.runner.hooks import (
    DistSamplerSeedHook,
    EarlyStoppingHook,
    EmptyCacheHook,
    IterTimerHook,
    ParamSchedulerHook,
    RuntimeInfoHook,
    SyncBuffersHook,
)
from flextrain.runner.hooks import runtime_info as iter_timer
from flextrain.runner.hooks import small_hooks as empty_cache
from flextrain.testing import WorkerGroup

from .training import refuses


def test_runtime_info_goes_into_the_hub_by_mode(runner: Any) -> None:
    hook, hub = RuntimeInfoHook(), runner.message_hub
    runner.train_dataloader.dataset = SimpleNamespace(metainfo={"classes": ["a"]})
    hook.before_run(runner)
    hook.before_train(runner)
    assert hub.get_info("loop_stage") == "train"
    assert (hub.get_info("max_epochs"), hub.get_info("max_iters"), hub.get_info("epoch")) == (2, 20, 0)
    assert hub.get_info("dataset_meta") == {"classes": ["a"]}
    assert hub.get_info("experiment_name") == "digits"

    runner.iter, runner.optim_wrapper.param_groups[0]["lr"] = 3, 0.25
    hook.before_train_iter(runner, 3)
    loss = torch.tensor(1.5)
    hook.after_train_iter(runner, 3, None, {"loss": loss, "aux": 2.0})
    assert hub.get_info("iter") == 3
    assert hub.get_scalar("train/loss")._new[0] is loss, "not copied, not read"
    assert {key: buffer.current() for key, buffer in hub.log_scalars.items()} == {
        "train/lr": 0.25,
        "train/loss": 1.5,
        "train/aux": 2.0,
    }

    hook.before_val(runner)
    assert hub.get_info("loop_stage") == "val"
    metrics = {"accuracy": 0.5, "f1": np.float64(0.25), "auc": torch.tensor([0.75]), "per_class": [1, 2]}
    hook.after_val_epoch(runner, metrics)
    hook.after_val(runner)
    assert hub.get_info("loop_stage") == "train"
    assert [hub.get_scalar(f"val/{key}").current() for key in ("accuracy", "f1", "auc")] == [0.5, 0.25, 0.75]
    assert hub.get_info("val/per_class") == [1, 2]
    hook.after_train(runner)
    assert hub.get_info("loop_stage") is None


@pytest.mark.parametrize("group", [{"lr": None}, {"step_size": 0.1}])
def test_an_optimizer_without_a_rate_shows_none(runner: Any, group: dict[str, Any]) -> None:
    """Adafactor of Transformers computes its own unless it is given one."""
    runner.optim_wrapper.wrappers[""] = SimpleNamespace(param_groups=[group])
    hook = RuntimeInfoHook()
    hook.before_train(runner)
    hook.before_train_iter(runner, 0)
    runner.message_hub.fetch("train/")
    assert "train/lr" not in {key for key, buffer in runner.message_hub.log_scalars.items() if len(buffer)}


def test_several_optimizers_show_a_rate_each(runner: Any) -> None:
    for name, rate in (("generator", 0.1), ("critic", 0.2)):
        runner.optim_wrapper.wrappers[name] = SimpleNamespace(param_groups=[{"lr": rate}, {"lr": 9.0}])
    del runner.optim_wrapper.wrappers[""]
    hook = RuntimeInfoHook()
    hook.before_train(runner)
    hook.before_train_iter(runner, 0)
    rates = {key: buffer.current() for key, buffer in runner.message_hub.log_scalars.items()}
    assert rates == {"train/generator.lr": 0.1, "train/critic.lr": 0.2}


class Clock:
    """A clock that stands still unless told otherwise."""

    now = 100.0

    def perf_counter(self) -> float:
        return self.now


def test_times_and_the_estimate_of_what_is_left(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(iter_timer, "time", clock)
    hook, hub = IterTimerHook(), runner.message_hub
    runner.iter = 5  # resumed there
    hook.before_train(runner)
    hook.before_train_epoch(runner)
    for i, seconds in enumerate([4.0, 1.0, 1.0]):
        clock.now += 0.25
        hook.before_train_iter(runner, i)
        clock.now += seconds - 0.25
        hook.after_train_iter(runner, i)
        runner.iter += 1
    assert hub.get_scalar("train/data_time").values == [0.25] * 3
    assert hub.get_scalar("train/time").values == [4.0, 1.0, 1.0]
    assert hub.get_info("eta") == pytest.approx(2.0 * (20 - 8))

    for _ in range(2):
        clock.now += 1000.0
        hook.before_val_epoch(runner)
        for i in range(4):
            clock.now += 0.5
            hook.before_val_iter(runner, i)
            clock.now += 0.5
            hook.after_val_iter(runner, i)
            assert hub.get_info("eta") == pytest.approx(3.0 - i)
    assert hub.get_scalar("val/time").values == [1.0] * 8
    assert hub.get_scalar("val/data_time").values == [0.5] * 8

    clock.now += 1000.0
    hook.before_train_epoch(runner)
    hook.before_train_iter(runner, 0)
    hook.after_train_iter(runner, 0)
    assert hub.get_info("eta") == pytest.approx(6.0 / 4 * 11), "validation does not count"


@pytest.mark.parametrize("place", ["sampler", "batch_sampler", "inside batch_sampler"])
def test_the_sampler_learns_the_epoch(runner: Any, place: str) -> None:
    epochs: list[int] = []
    sampler = SimpleNamespace(set_epoch=epochs.append)
    loader = runner.train_dataloader
    if place == "sampler":
        loader.sampler = sampler
    else:
        loader.sampler = object()
        loader.batch_sampler = sampler if place == "batch_sampler" else SimpleNamespace(sampler=sampler)
    runner.epoch = 3
    DistSamplerSeedHook().before_train_epoch(runner)
    assert epochs == [3]


class Scheduler:
    """Counts its steps."""

    def __init__(self, by_epoch: bool, skipped: bool = False, need_val_args: bool = False) -> None:
        self.by_epoch, self.need_val_args = by_epoch, need_val_args
        self.optimizer = SimpleNamespace(last_step=SimpleNamespace(skipped=skipped))
        self.steps: list[Any] = []

    def step(self, metrics: Any = None) -> None:
        self.steps.append(metrics)


@pytest.mark.parametrize("by_name", [False, True])
def test_schedulers_step_by_what_they_count_and_not_for_a_skipped_update(runner: Any, by_name: bool) -> None:
    every, skipping, epochs = Scheduler(False), Scheduler(False, skipped=True), Scheduler(True)
    plateau = Scheduler(True, need_val_args=True)
    schedulers = [every, skipping, epochs, plateau]
    runner.param_schedulers = {"a": schedulers[:2], "b": schedulers[2:]} if by_name else schedulers
    hook = ParamSchedulerHook()
    hook.after_val_epoch(runner, {"accuracy": 0.0})
    hook.before_train(runner)
    for i in range(3):
        hook.after_train_iter(runner, i)
    skipping.optimizer.last_step.skipped = False
    hook.after_train_iter(runner, 3)
    hook.after_train_epoch(runner)
    hook.after_val_epoch(runner, {"accuracy": 0.5})
    hook.after_train(runner)
    hook.after_val_epoch(runner, {"accuracy": 0.9})
    assert [len(s.steps) for s in schedulers] == [4, 1, 1, 2]
    assert plateau.steps == [None, {"accuracy": 0.5}], "a validation outside of training is not judged"


def test_an_overflow_does_not_move_the_schedule(new_run: Callable[..., FlexibleRunner]) -> None:
    run = new_run(
        optim_wrapper={"type": "AmpOptimWrapper", "dtype": "float16", "optimizer": {"type": "SGD", "lr": 0.1}},
        param_scheduler={"type": "LinearLR", "by_epoch": False, "start_factor": 0.1, "end": 10},
        train_cfg={"by_epoch": True, "max_epochs": 1},
    )
    seen: list[tuple[bool, float]] = []

    class Overflow(RuntimeInfoHook):
        priority = "HIGHEST"

        def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
            if batch_idx in (2, 3):
                data_batch[0].fill_(math.inf)

        def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
            seen.append((runner.optim_wrapper.last_step.skipped, runner.optim_wrapper.param_groups[0]["lr"]))

    run.register_hook(Overflow())
    with pytest.raises(NonFiniteError, match="in 2 parameters .norm.running_mean, norm.running_var."):
        run.train()  # no scaling protects running statistics
    assert [i for i, (skipped, _) in enumerate(seen) if skipped] == [2, 3]
    rates = [rate for _, rate in seen]
    assert rates[2] == rates[3] == rates[4]
    assert rates[0] < rates[1] < rates[2]
    assert rates[4] < rates[5] < rates[6]


def _buffers_after_sync(by_epoch: bool) -> list[tuple[float, int]]:
    strategy = DDPStrategy()
    strategy.join()
    module = nn.BatchNorm1d(2)
    strategy.setup(module)
    runner: Any = SimpleNamespace(strategy=strategy)
    hook, seen = SyncBuffersHook(), []
    for _ in range(2):
        module.running_mean.fill_(1.0 + 2.0 * strategy.topology.rank)  # type: ignore[union-attr]
        module.num_batches_tracked.fill_(strategy.topology.rank)  # type: ignore[union-attr]
        if by_epoch:
            hook.after_train_epoch(runner)
            seen.append((float(module.running_mean[0]), int(module.num_batches_tracked)))  # type: ignore[index,arg-type]
            module.running_mean.fill_(strategy.topology.rank)  # type: ignore[union-attr]
        hook.before_val_epoch(runner)
        seen.append((float(module.running_mean[0]), int(module.num_batches_tracked)))  # type: ignore[index,arg-type]
    strategy.leave()
    return seen


@pytest.mark.distributed
def test_buffers_become_means_over_ranks(workers2: WorkerGroup) -> None:
    assert workers2.run(_buffers_after_sync, False) == [[(2.0, 0)] * 2, [(2.0, 1)] * 2]
    first, second = workers2.run(_buffers_after_sync, True)
    assert first == [(2.0, 0), (0.0, 0)] * 2, "the validation after the epoch does not do it again"
    assert second == [(2.0, 1), (1.0, 1)] * 2


def test_the_cache_is_emptied_where_asked(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[torch.device] = []
    monkeypatch.setattr(empty_cache, "empty_cache", devices.append)

    def calls(hook: EmptyCacheHook) -> list[int]:
        counts = []
        for point in (hook.before_val_epoch, hook.after_train_epoch):
            devices.clear()
            point(runner)
            counts.append(len(devices))
        devices.clear()
        hook.after_train_iter(runner, 0)
        return [*counts, len(devices)]

    assert calls(EmptyCacheHook()) == [0, 1, 0]
    assert calls(EmptyCacheHook(before_epoch=True, after_epoch=False, after_iter=True)) == [1, 0, 1]
    assert devices == [torch.device("cpu")]


def stops_after(hook: EarlyStoppingHook, runner: Any, scores: list[float]) -> int | None:
    """The number of validations after which training stops."""
    runner.train_loop.stop_training = False
    hook.before_train(runner)
    for i, score in enumerate(scores, 1):
        runner.iter += 1
        hook.after_val_epoch(runner, {hook.monitor: score})
        if runner.train_loop.stop_training:
            return i
    return None


@pytest.mark.parametrize(
    ("options", "scores", "expected"),
    [
        ({"monitor": "accuracy", "patience": 2, "min_delta": 0.0}, [1.0, 2.0, 1.5, 1.9, 9.0], 4),
        ({"monitor": "accuracy", "patience": 2, "min_delta": 0.5}, [1.0, 1.4, 1.8, 2.0, 2.1, 2.2], 5),
        ({"monitor": "accuracy", "patience": 2, "min_delta": 0.5}, [1.0, 1.4, 1.5, 1.9, 2.5], None),
        ({"monitor": "val_loss", "patience": 2, "min_delta": 0.0}, [3.0, 2.0, 2.5, 2.1], 4),
        ({"monitor": "val_loss", "patience": 2, "min_delta": 0.25}, [3.0, 2.75, 2.6, 2.55], 4),
        ({"monitor": "score", "rule": "less", "patience": 1, "min_delta": 0.0}, [1.0, 1.5], 2),
        ({"monitor": "accuracy", "patience": 0, "min_delta": 0.0}, [1.0, 2.0, 1.5], 3),
        ({"monitor": "accuracy", "patience": 9}, [0.1, math.nan], 2),
        ({"monitor": "accuracy", "patience": 9}, [0.1, math.inf], 2),
        ({"monitor": "accuracy", "patience": 3, "check_finite": False}, [0.1, math.nan, math.nan, math.nan], 4),
        ({"monitor": "accuracy", "patience": 3, "check_finite": False}, [0.1, math.inf, 0.05, 0.02], 4),
        ({"monitor": "accuracy", "patience": 3, "check_finite": False}, [-math.inf, -math.inf, -math.inf], 3),
        ({"monitor": "accuracy", "stopping_threshold": 0.9}, [0.1, 0.9, 0.91], 3),
        ({"monitor": "loss", "stopping_threshold": 0.1}, [0.5, 0.1, 0.05], 3),
    ],
)
def test_training_stops_when_the_metric_says_so(
    runner: Any, options: dict[str, Any], scores: list[float], expected: int | None
) -> None:
    assert stops_after(EarlyStoppingHook(**options), runner, scores) == expected
    if expected is not None:
        assert "Training stops: " in runner.lines()[-1]


def test_patience_goes_on_where_a_resumed_run_had_stopped_counting(runner: Any) -> None:
    before = EarlyStoppingHook("accuracy", patience=3)
    assert stops_after(before, runner, [1.0, 0.9, 0.9]) is None
    after = EarlyStoppingHook("accuracy", patience=3)
    after.load_state_dict(before.state_dict())
    assert stops_after(after, runner, [0.9]) == 1


def test_the_best_value_of_another_metric_says_nothing(runner: Any) -> None:
    before = EarlyStoppingHook("accuracy", patience=2)
    assert stops_after(before, runner, [92.0, 91.0]) is None
    after = EarlyStoppingHook("mIoU", patience=2)
    after.load_state_dict(before.state_dict())
    assert stops_after(after, runner, [40.0, 41.0, 42.0]) is None
    assert (
        "the checkpoint has the best of accuracy (greater), and now mIoU (greater) is monitored"
        in runner.log_file.read_text()
    )
    again = EarlyStoppingHook("accuracy", patience=2)
    again.load_state_dict({"best_score": 92.0, "wait_count": 1})  # of an older version
    assert stops_after(again, runner, [91.0]) == 1


def test_a_threshold_that_was_passed_stops_a_resumed_run_too(runner: Any) -> None:
    before = EarlyStoppingHook("accuracy", stopping_threshold=0.9)
    assert stops_after(before, runner, [0.95]) == 1
    for threshold, stops in ((0.9, True), (0.97, False)):
        after = EarlyStoppingHook("accuracy", stopping_threshold=threshold)
        after.load_state_dict(before.state_dict())
        runner.train_loop.stop_training = False
        after.before_train(runner)
        assert runner.train_loop.stop_training is stops


def test_a_validation_outside_of_training_is_not_counted(runner: Any) -> None:
    hook = EarlyStoppingHook("accuracy", patience=1)
    hook.after_val_epoch(runner, {"accuracy": math.nan})
    assert not runner.train_loop.stop_training


def test_a_missing_metric_is_reported_or_raised(runner: Any) -> None:
    hook = EarlyStoppingHook("acuracy", rule="greater")
    hook.before_train(runner)
    hook.after_val_epoch(runner, {"accuracy": 0.5})
    assert 'did you mean "accuracy"' in runner.log_file.read_text()
    hook.strict = True
    with pytest.raises(ConfigError, match='"acuracy" is no metric of the validation, did you mean "accuracy"'):
        hook.after_val_epoch(runner, {"accuracy": 0.5})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"monitor": "score"}, 'EarlyStoppingHook.rule: missing, the name "score" does not say'),
        ({"monitor": "score", "rule": "more"}, 'EarlyStoppingHook.rule: "more" is not allowed, choose greater or less'),
    ],
)
def test_wrong_options_of_early_stopping(options: dict[str, Any], message: str) -> None:
    with refuses(ConfigError, message):
        EarlyStoppingHook(**options)
