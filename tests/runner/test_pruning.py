"""A search prunes a run: what the trial is told, how the run ends, on every process; Optuna with it; many runs in a row."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import flextrain
from flextrain import ConfigError, FlexibleRunner, FlexTrainError, TrialPruned
from flextrain.runner.hooks import Hook, PruningHook
from flextrain.testing import WorkerGroup

from .training import Stop, StopAt, make_runner, validation

pytestmark = pytest.mark.usefixtures("quick")
NEEDS_OPTUNA = pytest.mark.skipif(
    importlib.util.find_spec("optuna") is None, reason="needs pip install flextrain[tune]"
)


class Trial:
    """Notes what is reported, and prunes after so many reports."""

    def __init__(self, prune_after: int = 99) -> None:
        self.prune_after = prune_after
        self.reported: list[tuple[int, float]] = []
        self.attributes: dict[str, Any] = {}

    def report(self, value: float, step: int) -> None:
        self.reported.append((step, value))

    def should_prune(self) -> bool:
        return len(self.reported) >= self.prune_after

    def set_user_attr(self, key: str, value: Any) -> None:
        self.attributes[key] = value


class Ends(Hook):
    """Notes how a run ends."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def after_train(self, runner: Any) -> None:
        self.calls.append("after_train")

    def after_run(self, runner: Any) -> None:
        self.calls.append("after_run")

    def on_exception(self, runner: Any, exception: BaseException) -> None:
        self.calls.append("on_exception")


def run(folder: Path | str, trial: Any, monitor: str = "accuracy", **changes: Any) -> FlexibleRunner:
    own = changes.pop("custom_hooks", [])
    hook = dict(type="PruningHook", trial=trial, monitor=monitor)
    return make_runner(folder, **{**validation(), **changes}, custom_hooks=[hook, *own])


@pytest.mark.parametrize(
    ("train_cfg", "steps", "end"),
    [
        (dict(max_epochs=5), [1, 2], "after 2 epochs"),
        (dict(by_epoch=False, max_iters=20, val_interval=3), [3, 6], "after 6 iterations"),
    ],
    ids=["epochs", "iterations"],
)
def test_a_pruned_run_ends_in_order_and_then_raises(
    tmp_path: Path, train_cfg: dict[str, Any], steps: list[int], end: str
) -> None:
    trial, ends = Trial(prune_after=2), Ends()
    checkpoint = dict(by_epoch="by_epoch" not in train_cfg, interval=1, async_save=True)
    changes = dict(train_cfg=train_cfg, custom_hooks=[ends], default_hooks=dict(checkpoint=checkpoint))
    with run(tmp_path, trial, **changes) as runner:
        with pytest.raises(
            TrialPruned, match=rf"accuracy = \d+(\.\d+)? {end}, checkpoint .*/(epoch_2|iter_6)"
        ) as caught:
            runner.train()
        assert [step for step, _ in trial.reported] == steps
        assert ends.calls == ["after_train", "after_run"]
        folder = str(caught.value).partition("checkpoint ")[2]
        assert (Path(folder) / flextrain.core.checkpoint.manifest.MANIFEST).exists(), (
            "the save in the background is done"
        )
        assert trial.attributes == {"work_dir": str(tmp_path)}
        assert float(runner.val()["accuracy"]) == trial.reported[-1][1], "the pruned model can still be evaluated"
        assert len(trial.reported) == 2, "and that is not reported"


def test_a_run_that_is_not_pruned_is_that_without_the_hook(tmp_path: Path) -> None:
    trial = Trial()
    with run(tmp_path / "a", trial) as runner:
        first = runner.train().state_dict()
    with make_runner(tmp_path / "b", **validation()) as runner:
        second = runner.train().state_dict()
    assert [step for step, _ in trial.reported] == [1, 2, 3]
    assert all(torch.equal(first[name], second[name]) for name in second)


def test_an_exception_of_the_search_itself(tmp_path: Path) -> None:
    class Enough(Exception):
        pass

    hook = PruningHook(Trial(prune_after=1), "accuracy", error=Enough)
    with (
        make_runner(tmp_path, **validation(), custom_hooks=[hook]) as runner,
        pytest.raises(Enough, match="accuracy = "),
    ):
        runner.train()


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (dict(trial=object(), monitor="accuracy"), r"trial: .*"),
        (dict(trial=Trial(), monitor=""), r'monitor: "?\'?.* is not allowed, give the name'),
        (dict(trial=Trial(), monitor="accuracy", error=ValueError("x")), r"error: .*"),
    ],
)
def test_wrong_arguments(tmp_path: Path, arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=rf"^(PruningHook|custom_hooks\[0\])\.{match}"):
        make_runner(tmp_path, **validation(), custom_hooks=[dict(type="PruningHook", **arguments)])


@pytest.mark.parametrize(
    ("trial", "changes", "match"),
    [
        (Trial(), dict(monitor="acuracy"), 'is no metric of the validation, did you mean "accuracy"'),
        (Trial(), dict(val_dataloader=None, val_cfg=None, val_evaluator=None), "needs validation"),
        (None, {}, "rank 0 has none"),
        (
            SimpleNamespace(report=print, should_prune=print, study=SimpleNamespace(directions=[1, 2])),
            {},
            "2 objectives",
        ),
    ],
    ids=["metric", "validation", "no-trial", "objectives"],
)
def test_what_is_missing_is_told_before_the_first_update(
    tmp_path: Path, trial: Any, changes: dict[str, Any], match: str
) -> None:
    with run(tmp_path, trial, **changes) as runner:
        with pytest.raises(ConfigError, match=match):
            runner.train()
        assert runner.iter == 0


def test_a_metric_that_is_no_number(tmp_path: Path) -> None:
    with run(tmp_path, Trial(), monitor="indices") as runner, pytest.raises(ConfigError, match="is no number but list"):
        runner.train()


def test_a_closed_run_is_not_used_again(tmp_path: Path) -> None:
    runner = run(tmp_path, Trial())
    runner.close()
    runner.close()
    with pytest.raises(ConfigError, match="this run is closed, make another runner"):
        runner.train()


def test_closing_leaves_a_later_run_alone(tmp_path: Path) -> None:
    first = make_runner(tmp_path / "a", log_level="INFO")
    second = make_runner(tmp_path / "b", log_level="INFO")
    first.close()
    second.logger.info("still written")
    second.close()
    assert any("still written" in path.read_text() for path in (tmp_path / "b").glob("*/*.log"))


def test_determinism_of_one_run_is_not_that_of_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    for wanted in (False, True, True, False):
        with make_runner(tmp_path / str(wanted), randomness=dict(seed=1, deterministic=wanted)):
            assert torch.are_deterministic_algorithms_enabled() is wanted
            assert torch.backends.cudnn.deterministic is wanted


def held() -> dict[str, int]:
    """What this process holds that runs may leave behind."""
    gc.collect()
    return {
        "threads": sum(1 for _ in Path("/proc/self/task").iterdir()),
        "Python threads": threading.active_count(),
        "files": sum(1 for _ in Path("/proc/self/fd").iterdir()),
        "tensors": sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()),
        "process groups": len(dist.distributed_c10d._world.pg_map),
        "runners": sum(type(thing) is FlexibleRunner for thing in gc.get_objects()),
    }


def one_run(folder: str, number: int, **changes: Any) -> None:
    """A trial; every third one is pruned, every third fails in its second epoch."""
    trial = Trial(prune_after=1 if number % 3 == 1 else 99) if int(os.environ.get("RANK", 0)) == 0 else None
    checkpoint = dict(interval=1, async_save=True)
    own: list[Any] = [StopAt(8)] if number % 3 == 2 else [dict(type="EMAHook")]
    with run(
        f"{folder}/{number}", trial, custom_hooks=own, default_hooks=dict(checkpoint=checkpoint), **changes
    ) as runner:
        with contextlib.suppress(TrialPruned if number % 3 == 1 else Stop):
            runner.train()
        assert runner.epoch == (3, 1, 1)[number % 3]


def test_twenty_runs_in_a_row_leave_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        type(caplog.handler), "emit", lambda self, record: None
    )  # it keeps tracebacks, with all in them
    for number in range(4):
        one_run(str(tmp_path), number)
    before = held()
    for number in range(4, 20):
        one_run(str(tmp_path), number)
    after = held()
    assert all(after[name] <= before[name] for name in before), (before, after)


def two_in_a_row(folder: str, strategy: str, first: int, runs: int) -> list[dict[str, int]]:
    found = []
    for number in range(runs):
        one_run(f"{folder}/{strategy.replace(':', '')}", number, strategy=strategy)
        if number >= first:
            found.append(held())
    return found


@pytest.mark.distributed
@pytest.mark.full
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero1", "mesh:dp2", "mesh:tp2"])
def test_runs_in_a_row_on_two_processes_leave_nothing(workers2: WorkerGroup, tmp_path: Path, strategy: str) -> None:
    for before, *_, after in workers2.run(two_in_a_row, str(tmp_path), strategy, 3, 12):
        # Files and threads of connections that are being closed go a moment later.
        grown = {name: after[name] - before[name] for name in before}
        assert grown.pop("files") <= 4, (before, after)
        assert grown.pop("threads") <= 2, (before, after)
        assert max(grown.values()) <= 0, (before, after)


def on_two(folder: str, kind: str) -> tuple[str, str, int]:
    rank = int(os.environ["RANK"])
    trial: Any = Trial(prune_after=2) if rank == 0 or kind == "both" else None
    if kind == "storage fails" and rank == 0:

        def fail(value: float, step: int) -> None:
            raise OSError("the storage of the study is gone")

        trial.report = fail
    ends = Ends()
    with run(folder, trial, custom_hooks=[ends]) as runner:
        try:
            runner.train()
        except Exception as error:
            return type(error).__name__, str(error), runner.epoch
    raise AssertionError("nothing was raised")


@pytest.mark.distributed
def test_rank_0_decides_for_all(workers2: WorkerGroup, tmp_path: Path) -> None:
    for kind, message, epoch in workers2.run(on_two, str(tmp_path / "pruned"), "pruned"):
        assert (kind, epoch) == ("TrialPruned", 2)
        assert "after 2 epochs" in message
    for kind, message, _ in workers2.run(on_two, str(tmp_path / "both"), "both"):
        assert kind == "ConfigError"
        assert "rank 1 has one too" in message
    (first, other) = workers2.run(on_two, str(tmp_path / "fails"), "storage fails")
    assert first[:2] == ("OSError", "the storage of the study is gone")
    assert other[0] == FlexTrainError.__name__
    assert "rank 0: OSError" in other[1]


# Optuna itself


def objective(folder: Path, **changes: Any) -> Callable[[Any], float]:
    def train(trial: Any) -> float:
        lr = trial.suggest_float("lr", 1e-6, 0.3, log=True)
        with run(
            folder / str(trial.number), trial, optim_wrapper=dict(optimizer=dict(type="SGD", lr=lr)), **changes
        ) as runner:
            runner.train()
            return float(runner.val()["accuracy"])

    return train


@NEEDS_OPTUNA
def test_optuna_prunes_and_its_sampler_is_not_seeded_by_runs(tmp_path: Path) -> None:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    pruner = optuna.pruners.MedianPruner(n_startup_trials=2)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.RandomSampler(), pruner=pruner)
    study.enqueue_trial({"lr": 0.3})
    study.enqueue_trial({"lr": 0.2})
    study.enqueue_trial({"lr": 1e-6})
    study.optimize(objective(tmp_path), n_trials=6)
    states = [trial.state.name for trial in study.trials]
    assert states[:3] == ["COMPLETE", "COMPLETE", "PRUNED"], states
    assert len({trial.params["lr"] for trial in study.trials}) == 6, "every run has the seed 1"
    assert list(study.trials[2].intermediate_values) == [1]
    assert Path(study.best_trial.user_attrs["work_dir"]).parent == tmp_path
    assert study.best_value == study.best_trial.intermediate_values[3], "val() at the end says the same"


class OfOptuna(Trial):
    """One that the search knows as its own by the module of its class."""

    __module__ = "optuna.trial"


def pruned_by_optuna(folder: str) -> str:
    trial = OfOptuna(prune_after=1) if os.environ["RANK"] == "0" else None
    with run(folder, trial) as runner:
        try:
            runner.train()
        except Exception as error:
            return type(error).__module__
    return "nothing was raised"


@NEEDS_OPTUNA
@pytest.mark.distributed
def test_every_process_raises_what_the_search_of_rank_0_expects(workers2: WorkerGroup, tmp_path: Path) -> None:
    assert workers2.run(pruned_by_optuna, str(tmp_path)) == ["optuna.exceptions"] * 2
