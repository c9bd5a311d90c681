"""Loops of the user's own, written as with MMEngine: they count, accumulate, call hooks, save and resume as ours do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flextrain import LOOPS, BaseLoop, BaseMetric, BaseModel, ConfigError, Evaluator, FlexibleRunner
from flextrain.runner import EpochBasedTrainLoop, IterBasedTrainLoop, ValLoop
from flextrain.runner.hooks import Hook
from flextrain.runner.runner_names import INSTEAD
from flextrain.testing import WorkerGroup

from .training import (
    SGD,
    Accuracy,
    At,
    Net,
    Samples,
    SaveEvery,
    Watch,
    differences,
    make_runner,
    refuses,
    validation,
    whole_state,
)

pytestmark = pytest.mark.usefixtures("quick")


# Written as with MMEngine


@LOOPS.register_module(force=True)
class OwnIter(EpochBasedTrainLoop):
    """Hooks, a step and the count, one after the other."""

    def run_iter(self, idx: int, data_batch: Any) -> None:
        self.runner.call_hook("before_train_iter", batch_idx=idx, data_batch=data_batch)
        outputs = self.runner.model.train_step(data_batch, optim_wrapper=self.runner.optim_wrapper)
        self.runner.call_hook("after_train_iter", batch_idx=idx, data_batch=data_batch, outputs=outputs)
        self._iter += 1


class OwnEpoch(EpochBasedTrainLoop):
    def run_epoch(self) -> None:
        self.runner.call_hook("before_train_epoch")
        self.runner.model.train()
        for idx, data_batch in enumerate(self.dataloader):
            self.run_iter(idx, data_batch)
        self.runner.call_hook("after_train_epoch")
        self._epoch += 1


class OwnRun(OwnEpoch):
    def run(self) -> nn.Module:
        self.runner.call_hook("before_train")
        while self._epoch < self._max_epochs and not self.stop_training:
            self.run_epoch()
            self._decide_current_val_interval()
            loop = self.runner.val_loop
            if loop is not None and self._epoch >= self.val_begin and self._epoch % self.val_interval == 0:
                loop.run()
        self.runner.call_hook("after_train")
        model: nn.Module = self.runner.model
        return model


class Changes(EpochBasedTrainLoop):
    """Does something to every batch, and leaves the rest to the loop."""

    def run_iter(self, idx: int, data_batch: Any) -> None:  # type: ignore[override]
        super().run_iter(idx, data_batch)


class OwnIterOfIterations(IterBasedTrainLoop):
    """MMEngine's loop by iterations has no index."""

    def run_iter(self, data_batch: Any) -> None:  # type: ignore[override]
        super().run_iter(data_batch)


class OwnRunOfIterations(IterBasedTrainLoop):
    def run(self) -> None:
        self.runner.call_hook("before_train")
        self.runner.call_hook("before_train_epoch")
        while self._iter < self._max_iters and not self.stop_training:
            self.runner.model.train()
            self.run_iter(next(self.dataloader_iterator))
            self._decide_current_val_interval()
            if self.runner.val_loop is not None and self._iter % self.val_interval == 0:
                self.runner.val_loop.run()
        self.runner.call_hook("after_train_epoch")
        self.runner.call_hook("after_train")


class OwnValIter(ValLoop):
    @torch.no_grad()
    def run_iter(self, idx: int, data_batch: Any) -> None:
        self.runner.call_hook("before_val_iter", batch_idx=idx, data_batch=data_batch)
        outputs = self.runner.model.val_step(data_batch)
        self.evaluator.process(data_samples=outputs, data_batch=data_batch)
        self.runner.call_hook("after_val_iter", batch_idx=idx, data_batch=data_batch, outputs=outputs)


class OwnVal(ValLoop):
    """Leaves the model as it is after an evaluation, as MMEngine's loops do."""

    def run(self) -> dict[str, Any]:
        self.runner.call_hook("before_val")
        self.runner.call_hook("before_val_epoch")
        self.runner.model.eval()
        for idx, data_batch in enumerate(self.dataloader):
            self.run_iter(idx, data_batch)
        metrics = self.evaluator.evaluate(len(self.dataloader.dataset))
        self.runner.call_hook("after_val_epoch", metrics=metrics)
        self.runner.call_hook("after_val")
        return metrics


@LOOPS.register_module(force=True)
class Bare(BaseLoop):
    """From nothing."""

    def __init__(self, runner: Any, dataloader: Any, evaluator: Any) -> None:
        super().__init__(runner, dataloader)
        self.evaluator = self.runner.build_evaluator(evaluator)

    def run(self) -> dict[str, Any]:
        self.runner.call_hook("before_val")
        self.runner.model.eval()
        for data_batch in self.dataloader:
            self.evaluator.process(self.runner.model.val_step(data_batch), data_batch)
        metrics: dict[str, Any] = self.evaluator.evaluate()
        self.runner.call_hook("after_val_epoch", metrics=metrics)
        return metrics


EPOCHS = [OwnIter, OwnEpoch, OwnRun, Changes]
ITERATIONS = [OwnIterOfIterations, OwnRunOfIterations]


class Epochs(Hook):
    """Saves at the end of each epoch and in each validation, and notes down what loops count."""

    priority = "LOWEST"

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    def note(self, runner: Any, point: str, *more: Any) -> None:
        assert isinstance(runner, FlexibleRunner)
        loop = runner.train_loop
        is_training = point == "after_val" or runner.model.training
        self.seen.append((point, runner.epoch, runner.iter, is_training, loop.state_dict(), loop.inner, *more))

    def before_train_epoch(self, runner: Any) -> None:
        self.note(runner, "before_epoch")

    def after_train_epoch(self, runner: Any) -> None:
        self.note(runner, "after_epoch")

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        self.note(runner, "after_iter", batch_idx)

    def after_val_epoch(self, runner: Any, metrics: Any = None) -> None:
        self.note(runner, "after_val", metrics)


def run(folder: Path | str, train_cfg: dict[str, Any], accumulate: int = 1, **changes: Any) -> Any:
    """What was trained on, what hooks saw, and the state in the end."""
    watch, epochs = Watch(), Epochs()
    runner = make_runner(
        folder,
        train_cfg=train_cfg,
        optim_wrapper=dict(optimizer=SGD, accumulative_counts=accumulate, clip_grad=dict(max_norm=1.0)),
        param_scheduler=dict(type="LinearLR", end=9, by_epoch=False),
        custom_hooks=[watch, epochs, *changes.pop("custom_hooks", ())],
        **{**validation(6), **changes},
    )
    runner.train()
    found = (watch.trained, epochs.seen, torch.stack(watch.losses).tolist())
    state = whole_state(runner)
    runner.strategy.leave()
    return found, state


def check(found: Any, expected: Any) -> None:
    (trained, seen, losses), state = found
    assert trained == expected[0][0]
    # ``validated`` is what a loop's own run does not write down; where it is not, a resumed run validates no more often.
    for own, ours in zip(without_validated(seen), without_validated(expected[0][1]), strict=True):
        assert own == ours
    assert losses == expected[0][2]
    assert not differences(state, expected[1])


def without_validated(seen: list[Any]) -> list[Any]:
    return [tuple({**p, "validated": 0} if isinstance(p, dict) and "inner" in p else p for p in row) for row in seen]


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("kind", EPOCHS)
def test_training_by_epochs(tmp_path: Path, kind: type, accumulate: int) -> None:
    expected = run(tmp_path / "ours", dict(max_epochs=2), accumulate)
    check(run(tmp_path / "own", dict(type=kind, max_epochs=2), accumulate), expected)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("kind", ITERATIONS)
def test_training_by_iterations(tmp_path: Path, kind: type, accumulate: int) -> None:
    cfg = dict(max_iters=12, val_interval=4)
    expected = run(tmp_path / "ours", dict(by_epoch=False, **cfg), accumulate)
    check(run(tmp_path / "own", dict(type=kind, **cfg), accumulate), expected)


@pytest.mark.parametrize("at", [5, 7])
@pytest.mark.parametrize("kind", [*EPOCHS, *ITERATIONS])
def test_resuming(tmp_path: Path, kind: type, at: int) -> None:
    """In the middle of an epoch of seven, and at its end; the checkpoint is read by one of our loops, and the other way."""
    ours: dict[str, Any] = dict(max_epochs=2) if kind in EPOCHS else dict(by_epoch=False, max_iters=14, val_interval=7)
    own = {**ours, "type": kind}
    own.pop("by_epoch", None)
    expected = run(tmp_path / "ours", ours, custom_hooks=[SaveEvery({at})])
    run(tmp_path / "own", own, custom_hooks=[SaveEvery({at})])
    for written, read in (("ours", own), ("own", ours)):
        found, state = run(tmp_path / f"from {written}", read, resume=str(tmp_path / written / f"iter_{at}"))
        assert found[0] == expected[0][0][at:]
        assert not differences(state, expected[1])


class SaveAround(Hook):
    """Saves after the first epoch, and in its validation."""

    priority = "LOWEST"

    def after_train_epoch(self, runner: Any) -> None:
        if runner.iter == 7:
            runner.save_checkpoint(runner.work_dir, "after_epoch")

    def after_val_epoch(self, runner: Any, metrics: Any = None) -> None:
        if runner.iter == 7:
            runner.save_checkpoint(runner.work_dir, "in_validation")


def test_a_checkpoint_after_an_epoch_of_ones_own(tmp_path: Path) -> None:
    own = dict(type=OwnRun, max_epochs=2)
    expected, state = run(tmp_path / "own", own, custom_hooks=[SaveAround()])
    for name in ("after_epoch", "in_validation"):
        found, resumed = run(tmp_path / name, own, resume=str(tmp_path / "own" / name))
        assert found[0] == expected[0][7:]
        assert not differences(resumed, state)


def test_an_epoch_that_ends_early(tmp_path: Path) -> None:
    class Short(OwnEpoch):
        def run_epoch(self) -> None:
            self.runner.call_hook("before_train_epoch")
            for idx, data_batch in enumerate(self.dataloader):
                self.run_iter(idx, data_batch)
                if idx == 2:
                    break
            self.runner.call_hook("after_train_epoch")
            self._epoch += 1

    whole = run(tmp_path / "ours", dict(max_epochs=2))[0][0]
    hooks = dict(checkpoint=dict(interval=1))
    found = run(tmp_path / "own", dict(type=Short, max_epochs=2), default_hooks=hooks)[0][0]
    assert found == [*whole[:3], *whole[7:10]]
    again = run(tmp_path / "b", dict(type=Short, max_epochs=2), resume=str(tmp_path / "own" / "epoch_1"))[0][0]
    assert again == whole[7:10]


def test_training_again_after_an_exception(tmp_path: Path) -> None:
    class Fails(Hook):
        def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
            if runner.iter == 4 and not self.failed:
                self.failed = True
                raise ValueError

        failed = False

    expected = run(tmp_path / "ours", dict(max_epochs=2))[0][0]
    watch = Watch()
    runner = make_runner(tmp_path / "own", train_cfg=dict(type=OwnRun, max_epochs=2), custom_hooks=[watch, Fails()])
    with pytest.raises(ValueError):
        runner.train()
    runner.train()
    assert watch.trained == [*expected[:5], *expected[4:]]


# Evaluation


@pytest.mark.parametrize("kind", [OwnValIter, OwnVal, Bare, "Bare"])
def test_evaluation(tmp_path: Path, kind: Any) -> None:
    expected = run(tmp_path / "ours", dict(by_epoch=False, max_iters=8, val_interval=3))
    found = run(tmp_path / "own", dict(by_epoch=False, max_iters=8, val_interval=3), val_cfg=dict(type=kind))
    check(found, expected)
    runner = make_runner(tmp_path / "alone", **{**validation(6), "val_cfg": dict(type=kind)})
    assert runner.val()["count"] == 6
    loop = runner.val_loop
    assert loop is not None
    assert (loop.num_batches, len(loop.dataloader), loop.dataloader.batch_size) == (2, 2, 4)
    assert runner.val_dataloader is loop.loader
    assert not any(p.grad is not None for p in runner.strategy.module.parameters())


# What cannot be done


def refused(folder: Path, train: bool = True, **changes: Any) -> str:
    runner = make_runner(folder, **changes)
    with pytest.raises(ConfigError) as raised:
        runner.train() if train else runner.val()
    return str(raised.value)


def test_an_iteration_makes_one_update(tmp_path: Path) -> None:
    class None_(EpochBasedTrainLoop):
        def run_iter(self, idx: int, data_batch: Any) -> None:  # type: ignore[override]
            pass

    class Two(EpochBasedTrainLoop):
        def run_iter(self, idx: int, data_batch: Any) -> None:  # type: ignore[override]
            super().run_iter(idx, data_batch)
            super().run_iter(idx, data_batch)

    for kind, made in ((None_, "0 updates"), (Two, "2 updates")):
        says = refused(tmp_path, train_cfg=dict(type=kind, max_epochs=1))
        assert says.startswith(
            f"train_cfg.type: {kind.__name__} made {made} of a batch, and has to make one: call super()"
        )


def test_an_epoch_makes_an_update(tmp_path: Path) -> None:
    class Nothing(EpochBasedTrainLoop):
        def run_epoch(self) -> None:
            if self._epoch == 0:
                super().run_epoch()

    says = refused(tmp_path, train_cfg=dict(type=Nothing, max_epochs=2))
    assert says == "train_cfg.type: Nothing.run_epoch made no update, see run_iter"


class LeavesCounting(EpochBasedTrainLoop):
    """Does as little as possible, and that in another order."""

    def run_epoch(self) -> None:
        self.runner.model.train()
        self.runner.call_hook("before_train_epoch")
        batches = iter(self.dataloader)
        for _ in range(len(self.dataloader)):
            self.run_iter(next(batches))
        self._epoch += 1


def test_an_epoch_that_leaves_the_counting_to_the_loop(tmp_path: Path) -> None:
    hooks = dict(custom_hooks=[SaveAround()])
    expected, state = run(tmp_path / "ours", dict(max_epochs=2), **hooks)
    own = dict(type=LeavesCounting, max_epochs=2)
    found, own_state = run(tmp_path / "own", own, **hooks)
    assert found[0] == expected[0]
    assert not differences(own_state, state)
    again, resumed = run(tmp_path / "again", own, resume=str(tmp_path / "own" / "in_validation"))
    assert again[0] == expected[0][7:]
    assert not differences(resumed, state)


def test_steps_in_the_wrong_place(tmp_path: Path) -> None:
    class Other(EpochBasedTrainLoop):
        def run_iter(self, idx: int, data_batch: Any) -> None:  # type: ignore[override]
            self.runner.model.train_step(data_batch, optim_wrapper=object())

    class Trains(ValLoop):
        def run_iter(self, idx: int, data_batch: Any) -> None:
            self.runner.model.train_step(data_batch, self.runner.optim_wrapper)

    says = refused(tmp_path, train_cfg=dict(type=Other, max_epochs=1))
    assert says.startswith("train_cfg.type: Other calls train_step with another optim_wrapper than the runner's")
    says = refused(tmp_path, train=False, **{**validation(), "val_cfg": dict(type=Trains)})
    assert says == "val_cfg.type: Trains evaluates, and must not call train_step"


def test_hooks_of_another_pass(tmp_path: Path) -> None:
    tests = {key.replace("val_", "test_"): value for key, value in validation(4).items()}
    runner = make_runner(tmp_path, **{**tests, "test_cfg": dict(type=Bare)})
    with pytest.raises(ConfigError, match="^call_hook: hooks of val are called, but there is no val_dataloader$"):
        runner.test()


class NoEvaluator(BaseLoop):
    pass


@pytest.mark.parametrize(
    "changes, says",
    [
        (dict(train_cfg=dict(type="Bare")), "^train_cfg.type: Bare is no training loop; subclass EpochBasedTrainLoop or It"),
        (dict(val_cfg=dict(type=OwnIter)), "^val_cfg.type: OwnIter is no evaluation loop$"),
        (dict(val_cfg=dict(type=Net)), "^val_cfg.type: Net is no evaluation loop$"),
        (dict(val_cfg=dict(type=NoEvaluator)), "^val_cfg.type: NoEvaluator takes no evaluator; take runner, dataloader and e"),
        (dict(val_cfg=dict(type="Bare", fp16=True)), "^val_cfg.fp16: unknown key"),
    ],
)  # fmt: skip
def test_loops_in_the_wrong_place(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make_runner(tmp_path, **{**validation(), **changes})


# What a runner builds


class Second(EpochBasedTrainLoop):
    """Trains on two dataloaders, as semi-supervised training does."""

    def __init__(self, runner: Any, dataloader: Any, max_epochs: int, second: Any) -> None:
        super().__init__(runner, dataloader, max_epochs)
        self.second = iter(self.runner.build_dataloader(second, seed=self.runner.seed))

    def run_iter(self, idx: int, data_batch: Any) -> None:  # type: ignore[override]
        other = next(self.second)
        super().run_iter(idx, {key: torch.cat([value, other[key]]) for key, value in data_batch.items()})


def test_a_loop_with_two_dataloaders(tmp_path: Path) -> None:
    second = dict(batch_size=2, dataset=Samples(20), collate_fn="default_collate")
    cfg = dict(type=Second, max_epochs=1, second=second)
    watch = Watch()
    runner = make_runner(tmp_path, train_cfg=cfg, custom_hooks=[watch])
    runner.train()
    assert [len(batch) for batch in watch.trained] == [6] * 6 + [4]


def test_what_a_runner_has_and_builds(tmp_path: Path) -> None:
    tests = {key.replace("val_", "test_"): value for key, value in validation(4).items()}
    runner = make_runner(tmp_path, train_cfg=dict(max_epochs=4, val_interval=3, val_begin=2), **validation(5), **tests)
    assert (runner.val_interval, runner.val_begin) == (3, 2)
    assert isinstance(runner.val_evaluator, Evaluator)
    assert isinstance(runner.test_evaluator.metrics[0], Accuracy)
    assert runner.val_evaluator is not runner.test_evaluator
    assert (runner.model_name, runner.deterministic) == ("Net", False)
    assert [type(metric) for metric in runner.build_evaluator([dict(type=Accuracy)]).metrics] == [Accuracy]
    assert runner.build_train_loop(runner.train_loop) is runner.train_loop
    assert runner.build_train_loop(dict(by_epoch=False, max_iters=3)).max_iters == 3
    assert isinstance(runner.build_val_loop(dict()), ValLoop)
    assert runner.build_test_loop(runner.test_loop).mode == "test"  # type: ignore[arg-type]
    assert runner.build_log_processor(dict(window_size=3)).window_size == 3
    loader = runner.build_dataloader(dict(dataset=list(range(8)), batch_size=3), seed=3)
    assert sorted(i for batch in loader for i in batch) == list(range(8))
    with pytest.raises(ConfigError, match=r"^dataloader.batch_siz: unknown key"):
        runner.build_dataloader(dict(dataset=[1], batch_siz=3))
    before = FlexibleRunner.build_dataloader(dict(dataset=list(range(8)), batch_size=3), seed=3)
    assert [*before] == [*loader]
    for mode, build in (
        ("train", runner.build_train_loop),
        ("val", runner.build_val_loop),
        ("test", runner.build_test_loop),
    ):
        with pytest.raises(ConfigError, match=f"^{mode}_cfg: 'loop' is not allowed, give dict"):
            build("loop")  # type: ignore[operator]
    hook = Watch()
    runner.register_custom_hooks([hook, dict(type="EmptyCacheHook")])
    assert hook in runner.hooks
    alone = make_runner(tmp_path / "b")
    assert alone.val_evaluator is alone.test_evaluator is None


def test_names_of_mmengine_say_what_to_use(tmp_path: Path) -> None:
    runner = make_runner(tmp_path)
    for name, instead in INSTEAD.items():
        assert not hasattr(runner, name)
        with refuses(ConfigError, exactly=f"runner.{name}: is not here, {instead}", matches="^runner."):
            getattr(runner, name)


def test_an_error_in_building_a_part_keeps_its_own_words(tmp_path: Path) -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer.weight  # noqa: B018 - there is none

    with pytest.raises(AttributeError, match="'Broken' object has no attribute 'layer'"):
        _ = make_runner(tmp_path, model=Broken).model


# Two processes


def on_two(folder: str, strategy: str, train_cfg: Any, val_cfg: Any) -> Any:
    (trained, _, losses), state = run(folder, train_cfg, 2, strategy=dict(type=strategy), val_cfg=val_cfg, **uneven())
    return trained, losses, {key: value.tolist() for key, value in state.items() if isinstance(value, Tensor)}


def uneven() -> dict[str, Any]:
    """Five samples in batches of two: a process has one batch more than the other."""
    parts = validation(5)
    parts["val_dataloader"]["batch_size"] = 2
    return {"val_dataloader": parts["val_dataloader"]}


@pytest.mark.distributed
@pytest.mark.parametrize(
    "strategy",
    ["DDPStrategy", "FSDPStrategy", pytest.param("DeepSpeedStrategy", marks=pytest.mark.deepspeed)],
)
def test_on_two_processes(tmp_path: Path, workers2: WorkerGroup, strategy: str) -> None:
    expected = workers2.run(on_two, str(tmp_path / "ours"), strategy, dict(max_epochs=2), dict())
    own = dict(type=OwnIter, max_epochs=2)
    for i, val_cfg in enumerate((dict(type=OwnVal), dict(type=Bare))):
        found = workers2.run(on_two, str(tmp_path / f"own {i}"), strategy, own, val_cfg)
        for (trained, losses, state), (all_trained, all_losses, whole) in zip(found, expected, strict=True):
            assert (trained, losses) == (all_trained, all_losses)
            assert not differences(state, whole)


def built_before(folder: str) -> list[list[int]]:
    """What each process trains on with a DataLoader that was built before there was a process group."""
    watch = Watch()
    loader = FlexibleRunner.build_dataloader(dict(dataset=Samples(8), batch_size=2, collate_fn="default_collate"))
    runner = make_runner(folder, train_dataloader=loader, train_cfg=dict(max_epochs=1), custom_hooks=[watch])
    runner.train()
    runner.strategy.leave()
    return watch.trained


@pytest.mark.distributed
def test_a_dataloader_that_was_built_before_the_run_is_split(tmp_path: Path, workers2: WorkerGroup) -> None:
    first, second = workers2.run(built_before, str(tmp_path))
    assert sorted(index for batch in first + second for index in batch) == list(range(8))
    assert len(first) == len(second) == 2


class Statistic(BaseModel):
    """Predicts what its buffer holds."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 2)
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, index: Any, x: Tensor, y: Tensor, mode: str = "tensor") -> Any:
        return {"index": index, "logits": self.mean.expand(len(index)).tolist()}


class Means(BaseMetric):
    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results += data_samples["logits"]

    def compute_metrics(self, results: list[float]) -> dict[str, Any]:
        return {"means": results}


def statistics(folder: str, val_cfg: Any) -> Any:
    parts = {**validation(5), "val_cfg": val_cfg, "val_evaluator": Means}
    nothing: dict[str, Any] = dict(train_dataloader=None, optim_wrapper=None, train_cfg=None)
    differ = At("before_val", lambda runner: runner.strategy.module.mean.fill_(1.0 + runner.rank))
    strategy = dict(type="FSDPStrategy")  # DistributedDataParallel would share them in every forward
    runner = make_runner(folder, model=Statistic, custom_hooks=[differ], strategy=strategy, **{**nothing, **parts})
    metrics = runner.val()
    runner.strategy.leave()
    return metrics


@pytest.mark.distributed
def test_buffers_are_those_of_rank_0_on_all_processes(tmp_path: Path, workers2: WorkerGroup) -> None:
    for val_cfg in (dict(), dict(type=OwnVal), dict(type=Bare)):
        assert workers2.run(statistics, str(tmp_path), val_cfg) == [{"means": [1.0] * 5}] * 2
