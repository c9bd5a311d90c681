"""CheckpointHook: what is saved when, what is kept, and what is best."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flextrain import CheckpointError, ConfigError, FlexibleRunner, Hook
from flextrain.core.checkpoint import remove_checkpoint
from flextrain.runner.hooks import CheckpointHook
from flextrain.runner.hooks.checkpoint import BestScores
from flextrain.testing import WorkerGroup

from .conftest import make_run
from .training import log_lines, make_runner, refuses

Hooks = dict[str, Any]


def saved(folder: Path) -> list[str]:
    """Names of the checkpoints in a folder."""
    return sorted(path.parent.name for path in folder.glob("*/manifest.json"))


def with_checkpoints(**options: Any) -> Hooks:
    return {"checkpoint": {"type": "CheckpointHook", **options}}


class StopAfter(Hook):
    """Ends the process, so to speak, at an iteration, before anything is saved there."""

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        if runner.iter + 1 == self.iteration:
            raise KeyboardInterrupt


class Stage:
    """A checkpoint hook with a runner that trains nothing and saves empty checkpoints."""

    def __init__(self, runner: Any, **options: Any) -> None:
        self.runner, self.saved = runner, []
        runner.save_checkpoint = lambda folder, name, **_: self._save(folder, name)
        self.hook = CheckpointHook(**options)
        self.hook.check_folders(runner)
        self.hook.before_train(runner)

    def _save(self, folder: Path, name: str) -> None:
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "manifest.json").write_text("{}")
        self.saved.append(name)

    def train(self) -> list[str]:
        """Three epochs of ten iterations."""
        runner, hook = self.runner, self.hook
        runner.max_epochs, runner.max_iters = 3, 30
        for _ in range(3):
            for i in range(10):
                hook.after_train_iter(runner, i)
                runner.iter += 1
            hook.after_train_epoch(runner)
            runner.epoch += 1
        hook.after_train(runner)
        return self.saved

    def show(self, *validations: dict[str, Any]) -> list[str]:
        for metrics in validations:
            self.runner.epoch += 1
            self.runner.iter += 10
            self.hook.after_val_epoch(self.runner, metrics)
        return self.saved


def test_checkpoints_of_another_run_are_not_replaced_without_a_word(
    runner: Any, caplog: pytest.LogCaptureFixture
) -> None:
    runner.logger.addHandler(caplog.handler)
    Stage(runner, interval=1).train()
    Stage(runner, interval=1)  # the same run goes on
    runner.epoch = runner.iter = 0
    with pytest.raises(ConfigError, match=r"another run \(epoch_1, epoch_2, epoch_3\), which this one would replace"):
        Stage(runner, interval=1)
    assert "another run" not in caplog.text
    Stage(runner, interval=1, overwrite=True)
    assert "another run: epoch_1, epoch_2, epoch_3 will be replaced" in caplog.text
    caplog.clear()
    runner.options.resume_options = object()  # a run that is to be resumed, and finds nothing that it can begin with
    Stage(runner, interval=1)
    assert "which may be replaced" in caplog.text
    runner.logger.removeHandler(caplog.handler)


@pytest.mark.parametrize(
    ("options", "when"),
    [
        ({}, ", at the end only (CheckpointHook.interval=-1)"),
        ({"save_best": "accuracy"}, ", at the end and at a new best value only (CheckpointHook.interval=-1)"),
        ({"save_last": False}, ", when the run is preempted only (CheckpointHook.interval=-1)"),
        ({"interval": 1}, ""),
    ],
    ids=str,
)
def test_the_log_says_when_it_saves(runner: Any, options: dict[str, Any], when: str) -> None:
    with log_lines(logging.INFO) as lines:
        Stage(runner, **options)
    assert f"Checkpoints will be saved to {runner.work_dir}{when}" in lines


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["epoch_3"]),
        ({"save_last": False}, []),
        ({"interval": 1}, ["epoch_1", "epoch_2", "epoch_3"]),
        ({"interval": 2}, ["epoch_2", "epoch_3"]),
        ({"interval": 2, "save_last": False}, ["epoch_2"]),
        ({"interval": 1, "save_begin": 2, "save_last": False}, ["epoch_2", "epoch_3"]),
        ({"interval": 2, "save_begin": 1, "save_last": False}, ["epoch_1", "epoch_3"]),
        ({"interval": 12, "by_epoch": False}, ["iter_12", "iter_24", "iter_30"]),
        ({"interval": 12, "by_epoch": False, "save_begin": 5, "save_last": False}, ["iter_17", "iter_29", "iter_5"]),
        ({"interval": 1, "max_keep_ckpts": 2}, ["epoch_2", "epoch_3"]),
        ({"interval": 7, "by_epoch": False, "max_keep_ckpts": 1}, ["iter_30"]),
        ({"interval": 3, "filename_tmpl": "state-{}-of-3"}, ["state-3-of-3"]),
    ],
)
def test_checkpoints_come_at_their_interval(runner: Any, options: dict[str, Any], expected: list[str]) -> None:
    names = Stage(runner, **options).train()
    assert saved(Path(runner.work_dir)) == expected
    assert len(names) == len(set(names)), "nothing is saved twice"


def test_a_loop_without_epochs_saves_by_iteration(new_run: Callable[..., FlexibleRunner], tmp_path: Path) -> None:
    run = new_run(
        scores=[0.1, 0.2, 0.15],
        train_cfg={"by_epoch": False, "max_iters": 25, "val_interval": 12},
        default_hooks=with_checkpoints(interval=10, by_epoch=False, save_best="accuracy"),
    )
    run.train()
    assert saved(tmp_path / "work") == ["best_accuracy_iter_24", "iter_10", "iter_20", "iter_25"]


def test_out_dir_gets_a_subfolder_named_like_the_work_directory(
    new_run: Callable[..., FlexibleRunner], tmp_path: Path
) -> None:
    run = new_run(default_hooks=with_checkpoints(out_dir=str(tmp_path / "out")))
    run.train()
    assert saved(tmp_path / "out" / "work") == ["epoch_3"]
    assert saved(tmp_path / "work") == []
    assert run.message_hub.get_info("last_ckpt") == str(tmp_path / "out" / "work" / "epoch_3")


@pytest.mark.parametrize("folder", ["/proc/nope", "a_file/below"])
def test_a_folder_that_cannot_be_written_to_is_found_before_training(
    new_run: Callable[..., FlexibleRunner], tmp_path: Path, folder: str
) -> None:
    (tmp_path / "a_file").touch()
    run = new_run(default_hooks=with_checkpoints(out_dir=str(tmp_path / folder)))
    with refuses(ConfigError, begins=f'CheckpointHook.out_dir: "{tmp_path / folder / "work"}" cannot be written to, '):
        run.train()
    assert run.iter == 0


def test_nothing_is_left_of_trying_the_folder(new_run: Callable[..., FlexibleRunner], tmp_path: Path) -> None:
    new_run(default_hooks=with_checkpoints(out_dir=str(tmp_path / "out"), save_last=False)).train()
    assert list((tmp_path / "out" / "work").iterdir()) == []


def test_a_number_of_one_is_no_plural(
    new_run: Callable[..., FlexibleRunner], capsys: pytest.CaptureFixture[str]
) -> None:
    new_run(default_hooks=with_checkpoints(interval=1)).train()
    text = capsys.readouterr().out
    assert "Saving checkpoint at 1 epoch\n" in text
    assert "Saving checkpoint at 2 epochs\n" in text


def test_training_that_stops_early_saves_its_last_state(new_run: Callable[..., FlexibleRunner], tmp_path: Path) -> None:
    stopping = {"type": "EarlyStoppingHook", "monitor": "accuracy", "patience": 1}
    for save_last, expected in ((True, ["epoch_2"]), (False, [])):
        folder = tmp_path / str(save_last)
        checkpoints = with_checkpoints(interval=5, save_last=save_last)
        new_run(folder, scores=[0.5, 0.5], custom_hooks=[stopping], default_hooks=checkpoints).train()
        assert saved(folder) == expected


def test_what_stopped_early_stays_so_until_the_rule_is_another(
    new_run: Callable[..., FlexibleRunner], tmp_path: Path
) -> None:
    def started(patience: int, scores: list[float]) -> str:
        stopping = {"type": "EarlyStoppingHook", "monitor": "accuracy", "patience": patience}
        checkpoints = with_checkpoints(interval=5)
        run = new_run(scores=scores, custom_hooks=[stopping], default_hooks=checkpoints, resume=True)
        run.train()
        return (Path(run.log_dir) / f"{run.timestamp}.log").read_text()

    assert "  ended        early at epoch 2, a hook has set train_loop.stop_training\n" in started(1, [0.5, 0.5])
    for _ in range(3):
        log = started(1, [0.5])
        assert log.count("Training stops: accuracy has not improved in ") == 1
        assert saved(tmp_path / "work") == ["epoch_2"]
    assert "as configured" in started(9, [0.5] * 9)
    assert saved(tmp_path / "work") != ["epoch_2"]


def test_the_optimizer_can_be_left_out(new_run: Callable[..., FlexibleRunner], tmp_path: Path) -> None:
    options = {"interval": 3, "save_optimizer": False, "save_param_scheduler": False}
    new_run(param_scheduler={"type": "LinearLR"}, default_hooks=with_checkpoints(**options)).train()
    values = json.loads((tmp_path / "work" / "epoch_3" / "values.json").read_text())
    manifest = json.loads((tmp_path / "work" / "epoch_3" / "manifest.json").read_text())
    assert not [key for key in {**values, **manifest["tensors"]} if key.startswith(("optim", "scheduler"))]


# What is kept


def test_the_older_one_goes_only_after_the_newer_one_is_complete(
    new_run: Callable[..., FlexibleRunner], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(default_hooks=with_checkpoints(interval=1, max_keep_ckpts=1))
    save = run.save_checkpoint

    def failing(out_dir: Any, filename: str, **options: Any) -> str:
        if filename == "epoch_3":
            raise CheckpointError("disk full")
        path = save(out_dir, filename, **options)
        seen.append(saved(tmp_path / "work"))
        return path

    seen: list[list[str]] = []
    monkeypatch.setattr(run, "save_checkpoint", failing)
    with pytest.raises(CheckpointError, match="disk full"):
        run.train()
    assert seen == [["epoch_1"], ["epoch_1", "epoch_2"]]
    assert saved(tmp_path / "work") == ["epoch_2"]


def test_what_another_run_left_goes_when_it_is_overwritten(
    new_run: Callable[..., FlexibleRunner], tmp_path: Path
) -> None:
    work = tmp_path / "work"
    new_run(default_hooks=with_checkpoints(interval=1)).train()
    for name in ("epoch_1", "epoch_3"):
        (work / name / "manifest.json").unlink()
    (work / "epoch_9").mkdir()
    (work / "epoch_9" / "manifest.json").write_text("{}")
    run = new_run(
        scores=[0.1, 0.2, 0.3],
        default_hooks=with_checkpoints(interval=1, max_keep_ckpts=1, save_best="auto", overwrite=True),
    )
    run.train()
    assert saved(work) == ["best_accuracy_epoch_3", "epoch_3"]


def test_a_resumed_run_keeps_counting(new_run: Callable[..., FlexibleRunner], tmp_path: Path) -> None:
    checkpoints = with_checkpoints(interval=5, by_epoch=False, max_keep_ckpts=2)
    with pytest.raises(KeyboardInterrupt):
        new_run(default_hooks=checkpoints, custom_hooks=[StopAfter(18)]).train()
    assert saved(tmp_path / "work") == ["iter_10", "iter_15"]
    new_run(default_hooks=checkpoints, resume=True).train()
    assert saved(tmp_path / "work") == ["iter_25", "iter_30"]


def test_a_run_resumed_further_back_counts_from_there(new_run: Callable[..., FlexibleRunner], tmp_path: Path) -> None:
    work = tmp_path / "work"
    new_run(default_hooks=with_checkpoints(interval=5, by_epoch=False)).train()
    fewer = with_checkpoints(interval=5, by_epoch=False, max_keep_ckpts=2)
    with pytest.raises(KeyboardInterrupt):
        new_run(default_hooks=fewer, resume=str(work / "iter_15"), custom_hooks=[StopAfter(22)]).train()
    assert saved(work) == ["iter_15", "iter_20", "iter_25", "iter_30"], "5 and 10 are its own, 25 and 30 are not yet"
    assert (work / "latest").read_text().strip() == "iter_20"


def test_a_checkpoint_that_is_saved_again_counts_once(runner: Any) -> None:
    stage = Stage(runner, interval=1, max_keep_ckpts=1, save_optimizer=False)
    stage.hook.after_train_epoch(runner)
    stage.hook.after_train_epoch(runner)
    assert saved(Path(runner.work_dir)) == ["epoch_1"]


def test_what_latest_names_stays(new_run: Callable[..., FlexibleRunner], tmp_path: Path) -> None:
    work = tmp_path / "work"

    class Pin(Hook):
        priority = "LOWEST"

        def after_train_epoch(self, runner: Any) -> None:
            (work / "latest").write_text("epoch_1")

    # Without the optimizer a checkpoint does not become the latest.
    checkpoints = with_checkpoints(interval=1, max_keep_ckpts=1, save_optimizer=False)
    new_run(default_hooks=checkpoints, custom_hooks=[Pin()]).train()
    assert saved(work) == ["epoch_1", "epoch_3"]


# What is best


def test_the_best_takes_the_place_of_the_one_before(new_run: Callable[..., FlexibleRunner], tmp_path: Path) -> None:
    work = tmp_path / "work"
    run = new_run(scores=[0.5, 0.7, 0.6], default_hooks=with_checkpoints(interval=1, save_best="accuracy"))
    run.train()
    assert saved(work) == ["best_accuracy_epoch_2", "epoch_1", "epoch_2", "epoch_3"]
    assert (work / "latest").read_text().strip() == "epoch_3", "the best one has no optimizer, it cannot be resumed"
    assert run.message_hub.get_info("best_score") == 0.7
    assert run.message_hub.get_info("best_ckpt") == str(work / "best_accuracy_epoch_2")
    manifest = json.loads((work / "best_accuracy_epoch_2" / "manifest.json").read_text())
    assert not [key for key in manifest["tensors"] if key.startswith("optim")]


@pytest.mark.parametrize(
    ("options", "key", "values", "best"),
    [
        ({"save_best": "accuracy"}, "accuracy", [0.1, 0.3, 0.2, 0.3], [1, 2]),
        ({"save_best": "val_loss"}, "val_loss", [3.0, 4.0, 2.0], [1, 3]),
        ({"save_best": "TOP-1"}, "TOP-1", [1, 2], [1, 2]),
        ({"save_best": "coco/bbox_mAP"}, "coco/bbox_mAP", [0.1, 0.2], [1, 2]),
        ({"save_best": "score", "rule": "less"}, "score", [1.0, 2.0, 0.5], [1, 3]),
        ({"save_best": "score", "rule": ["greater"]}, "score", [1.0, 2.0], [1, 2]),
        ({"save_best": "fid", "less_keys": ["fid"]}, "fid", [2.0, 1.0], [1, 2]),
        ({"save_best": "wins", "greater_keys": "win"}, "wins", [1.0, 2.0], [1, 2]),
        ({"save_best": "accuracy"}, "accuracy", [math.nan, 0.1, math.nan, None, 0.2], [2, 5]),
    ],
)
def test_better_is_what_the_rule_or_the_name_says(
    runner: Any, options: dict[str, Any], key: str, values: list[Any], best: list[int]
) -> None:
    stage = Stage(runner, **options)
    name = key.replace("/", "_")
    assert stage.show(*({key: value} for value in values)) == [f"best_{name}_epoch_{epoch}" for epoch in best]
    assert saved(Path(runner.work_dir)) == [f"best_{name}_epoch_{best[-1]}"]


def test_several_metrics_are_staged_each_by_itself(runner: Any) -> None:
    stage = Stage(runner, save_best=["accuracy", "loss"])
    stage.show({"accuracy": 0.5, "loss": 1.0}, {"accuracy": 0.6, "loss": 2.0}, {"accuracy": 0.5, "loss": 0.5})
    assert saved(Path(runner.work_dir)) == ["best_accuracy_epoch_2", "best_loss_epoch_3"]
    assert runner.message_hub.get_info("best_score_loss") == 0.5
    assert runner.message_hub.get_info("best_score") is None


def test_a_rule_that_keeps_the_worst_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    for key, rule in (("perplexity", "greater"), ("accuracy", "less"), ("val/loss", "greater")):
        BestScores(key, rule, None, None, "CheckpointHook")
        assert f'CheckpointHook.rule: "{rule}" keeps the checkpoint with the worst {key}' in caplog.text
    caplog.clear()
    for key, rule in (("perplexity", "less"), ("accuracy", "greater"), ("top1_error", "less"), ("distance", "greater")):
        BestScores(key, rule, None, None, "CheckpointHook")
    assert not caplog.text


def test_auto_is_the_first_metric_of_the_first_validation(runner: Any) -> None:
    stage = Stage(runner, save_best="auto")
    assert stage.show({"loss": 1.0, "accuracy": 0.5}, {"accuracy": 0.9, "loss": 2.0}) == ["best_loss_epoch_1"]


def test_a_missing_metric_and_no_metrics_at_all(runner: Any) -> None:
    stage = Stage(runner, save_best="acuracy", rule="greater")
    with pytest.raises(ConfigError, match='"acuracy" is no metric of the validation, did you mean "accuracy"'):
        stage.show({"accuracy": 0.5})
    with pytest.raises(ConfigError, match=r"save_best: \"acuracy\" is \[1\], which is no number"):
        stage.show({"acuracy": [1]})
    assert stage.show({}) == []
    assert "the validation gave no metrics" in runner.log_file.read_text()


def test_a_validation_outside_of_training_saves_nothing(new_run: Callable[..., FlexibleRunner], tmp_path: Path) -> None:
    run = new_run(scores=[0.1, 0.2, 0.3, 0.9], default_hooks=with_checkpoints(save_best="accuracy"))
    run.train()
    run.val()
    assert saved(tmp_path / "work") == ["best_accuracy_epoch_3", "epoch_3"]
    assert run.message_hub.get_info("best_score") == 0.3


def test_a_run_resumed_from_before_its_best_validation_knows_it(
    new_run: Callable[..., FlexibleRunner], tmp_path: Path
) -> None:
    """epoch_2 is written before the validation that makes it the best; a run that resumes it validates again."""
    work = tmp_path / "work"
    checkpoints = with_checkpoints(interval=1, save_best="accuracy")
    with pytest.raises(KeyboardInterrupt):
        new_run(scores=[0.5, 0.9], default_hooks=checkpoints, custom_hooks=[StopAfter(25)]).train()
    state = json.loads((work / "epoch_2" / "values.json").read_text())
    assert "best_accuracy_epoch_1" in json.dumps(state["hook.CheckpointHook/best"])
    new_run(scores=[0.9, 0.7], default_hooks=checkpoints, resume=True).train()
    assert saved(work) == ["best_accuracy_epoch_2", "epoch_1", "epoch_2", "epoch_3"]


def test_the_best_of_a_future_that_was_given_up_does_not_count(
    new_run: Callable[..., FlexibleRunner], tmp_path: Path
) -> None:
    work = tmp_path / "work"
    checkpoints = with_checkpoints(interval=1, save_best="accuracy")
    new_run(scores=[0.5, 0.6, 0.9], default_hooks=checkpoints).train()
    run = new_run(scores=[0.5, 0.7, 0.6], default_hooks=checkpoints, resume=str(work / "epoch_1"))
    run.train()
    assert run.message_hub.get_info("best_score") == 0.7


def test_a_best_score_whose_checkpoint_is_gone_does_not_count(
    new_run: Callable[..., FlexibleRunner], tmp_path: Path
) -> None:
    """The run was resumed from before the validation whose better checkpoint had replaced it."""
    work = tmp_path / "work"
    checkpoints = with_checkpoints(interval=2, save_best="accuracy")
    five = {"by_epoch": True, "max_epochs": 5}
    stopping = [StopAfter(35)]
    with pytest.raises(KeyboardInterrupt):
        new_run(scores=[0.8, 0.1, 0.9], default_hooks=checkpoints, custom_hooks=stopping, train_cfg=five).train()
    assert saved(work) == ["best_accuracy_epoch_3", "epoch_2"]
    run = new_run(scores=[0.1, 0.7, 0.6, 0.5], default_hooks=checkpoints, train_cfg=five, resume=True)
    with log_lines() as lines:
        run.train()
    (said,) = (line for line in lines if "CheckpointHook.save_best" in line)
    assert "best_accuracy_epoch_1, the best by accuracy = 0.8000, is not in" in said
    assert run.message_hub.get_info("best_score") == 0.7
    assert (work / "best_accuracy_epoch_3" / "manifest.json").is_file()
    assert run.message_hub.get_info("best_ckpt") == str(work / "best_accuracy_epoch_3")


@pytest.mark.parametrize("gone", [False, True])
def test_the_best_of_a_run_that_goes_on_elsewhere_counts_while_it_is_there(
    new_run: Callable[..., FlexibleRunner], tmp_path: Path, gone: bool
) -> None:
    checkpoints = with_checkpoints(interval=2, save_best="accuracy")
    new_run(scores=[0.8, 0.1], default_hooks=checkpoints, train_cfg={"by_epoch": True, "max_epochs": 2}).train()
    if gone:
        remove_checkpoint(tmp_path / "work" / "best_accuracy_epoch_1")
    elsewhere = tmp_path / "elsewhere"
    source = str(tmp_path / "work" / "epoch_2")
    run = new_run(elsewhere, scores=[0.1, 0.7], default_hooks=checkpoints, resume=source)
    run.train()
    assert run.message_hub.get_info("best_score") == (0.7 if gone else 0.8)
    assert (elsewhere / "best_accuracy_epoch_3").is_dir() == gone


def test_the_best_of_another_run_in_the_same_folder_does_not_count(
    new_run: Callable[..., FlexibleRunner], tmp_path: Path
) -> None:
    checkpoints = with_checkpoints(interval=1, save_best="accuracy", overwrite=True)
    new_run(scores=[0.9, 0.9, 0.9], default_hooks=checkpoints).train()
    with pytest.raises(KeyboardInterrupt):
        new_run(scores=[0.1], default_hooks=checkpoints, custom_hooks=[StopAfter(15)]).train()
    run = new_run(scores=[0.1, 0.2, 0.3], default_hooks=checkpoints, resume=True)
    run.train()
    assert run.message_hub.get_info("best_score") == 0.3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"interval": 0}, "CheckpointHook.interval: 0 is not allowed"),
        ({"max_keep_ckpts": 0}, "CheckpointHook.max_keep_ckpts: 0 is not allowed"),
        ({"save_begin": -1}, "CheckpointHook.save_begin: -1 is not allowed"),
        ({"filename_tmpl": "epoch"}, 'CheckpointHook.filename_tmpl: "epoch" is not allowed'),
        ({"filename_tmpl": "epoch_{}.pth"}, "checkpoints are directories"),
        ({"filename_tmpl": "a/{}"}, "CheckpointHook.filename_tmpl: "),
        ({"save_best": "score"}, 'CheckpointHook.rule: missing, the name "score" does not say'),
        ({"save_best": "acc", "rule": "more"}, 'CheckpointHook.rule: "more" is not allowed, choose greater or less'),
        ({"save_best": ["acc", "acc"]}, "names a metric twice"),
        ({"save_best": ["auto", "acc"]}, '"auto" stands alone'),
        ({"save_best": ["acc", "loss"], "rule": ["less", "less", "less"]}, "give one rule or one for each"),
        ({"rule": "less"}, "CheckpointHook.rule: has no meaning without save_best"),
        ({"published_keys": ["state_dict"]}, "CheckpointHook.published_keys: has no meaning here, a checkpoint needs"),
        ({"backend_args": {}}, "CheckpointHook.backend_args: has no meaning here"),
        ({"file_client_args": {}}, "CheckpointHook.file_client_args: has no meaning here"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with refuses(ConfigError, message):
        CheckpointHook(**options)


def _train_together(folder: str, resume: bool, scores: list[float]) -> tuple[list[str], list[str]]:
    """What this rank had saved, and what is left, of a run on all processes."""
    asked: list[str] = []
    run = make_run(
        Path(folder),
        scores,
        train_cfg={"by_epoch": True, "max_epochs": 5 if resume else 3},
        default_hooks=with_checkpoints(interval=1, max_keep_ckpts=2, save_best="accuracy"),
        custom_hooks=[{"type": "EMAHook"}],
        resume=resume,
        launcher="pytorch",
        env_cfg={"dry_run": False},  # the scores are counted
    )
    save = run.save_checkpoint

    def note(out_dir: Any, filename: str, **options: Any) -> str:
        asked.append(filename)
        return save(out_dir, filename, **options)

    run.save_checkpoint = note  # type: ignore[method-assign]
    run.train()
    run.strategy.leave()
    return asked, saved(Path(folder))


@pytest.mark.distributed
def test_all_ranks_save_together_and_agree_on_the_best(workers2: WorkerGroup, tmp_path: Path) -> None:
    folder = str(tmp_path / "work")
    first, second = workers2.run(_train_together, folder, False, [0.5, 0.9, 0.1])
    assert first == second
    assert first[0] == ["epoch_1", "best_accuracy_epoch_1", "epoch_2", "best_accuracy_epoch_2", "epoch_3"]
    assert first[1] == ["best_accuracy_epoch_2", "epoch_2", "epoch_3"]
    first, second = workers2.run(_train_together, folder, True, [0.1, 0.7, 0.95])
    assert first[0] == second[0] == ["epoch_4", "epoch_5", "best_accuracy_epoch_5"]
    assert saved(Path(folder)) == ["best_accuracy_epoch_5", "epoch_4", "epoch_5"]


def _try_a_folder(folder: str) -> str:
    out_dir = "/proc/nope" if int(os.environ["RANK"]) == 0 else folder  # rank 0 alone cannot write, and all are told
    runner = make_runner(folder, default_hooks=with_checkpoints(out_dir=out_dir))
    with pytest.raises(ConfigError) as caught:
        runner.train()
    runner.strategy.leave()
    return str(caught.value)


@pytest.mark.distributed
def test_all_ranks_are_told_of_a_folder_that_cannot_be_written_to(workers2: WorkerGroup, tmp_path: Path) -> None:
    first, second = workers2.run(_try_a_folder, str(tmp_path))
    assert first == second
    assert first.startswith('CheckpointHook.out_dir: "/proc/nope/')
