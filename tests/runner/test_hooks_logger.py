"""LoggerHook: when lines come, what reporters get, and what is left at the end."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flextrain import ConfigError, FlexibleRunner
from flextrain.core.comm import collectives
from flextrain.runner.hooks import Hook, LoggerHook
from flextrain.runner.hooks import logger as closing_summary
from flextrain.runner.hooks import logger as line_queue
from flextrain.runner.reporting import LogProcessor, Reporter
from flextrain.runner.reporting.log_processor import units
from flextrain.testing import WorkerGroup

from .conftest import make_run


def logged_at(hook: LoggerHook, runner: Any, epochs: int = 1) -> list[int]:
    """The iterations, counted from 1, that get a line."""
    hook.before_train(runner)
    hook.before_train_epoch(runner)
    length = runner.train_loop.epoch_length
    for runner.iter in range(epochs * length):
        runner.epoch = runner.iter // length
        runner.message_hub.update_scalar("train/loss", float(runner.iter))
        hook.after_train_iter(runner, runner.iter % length)
    hook.after_train_epoch(runner)
    return [event[1] for event in runner.reporters[0].events if event[0] == "train"]


@pytest.mark.parametrize(
    ("options", "length", "expected"),
    [
        ({}, 25, [10, 20, 35, 45]),
        ({"ignore_last": False}, 25, [10, 20, 25, 35, 45, 50]),
        ({"interval": 5}, 10, [5, 10, 15, 20]),
        ({"interval": 10}, 7, [7, 14]),
        ({"interval": 7}, 7, [7, 14]),
        ({"interval": 100}, 25, [25, 50]),
    ],
)
def test_lines_come_at_the_interval_of_each_epoch(
    runner: Any, options: dict[str, Any], length: int, expected: list[int]
) -> None:
    runner.train_loop.epoch_length = length
    assert logged_at(LoggerHook(tables=False, **options), runner, epochs=2) == expected


def test_a_loop_without_epochs_counts_all_its_iterations(runner: Any) -> None:
    runner.train_loop.by_epoch, runner.train_loop.max_iters = False, 25
    runner.train_loop.epoch_length, runner.max_iters = 7, 25
    hook = LoggerHook(tables=False, ignore_last=False)
    hook.before_train(runner)
    hook.before_train_epoch(runner)
    for runner.iter in range(25):
        hook.after_train_iter(runner, runner.iter % 7)
    hook.after_train_epoch(runner)
    assert [event[1] for event in runner.reporters[0].events if event[0] == "train"] == [10, 20, 25]


@pytest.mark.parametrize(("interval", "count"), [(None, 1), (4, 3)])
def test_the_experiment_is_named_once_or_at_its_interval_too(runner: Any, interval: int | None, count: int) -> None:
    runner.train_loop.epoch_length = 10
    hook = LoggerHook(tables=False, interval_exp_name=interval)
    hook.before_train(runner)
    logged_at(hook, runner)
    assert runner.lines().count("Exp name: digits") == count, "at the start, after 4 and after 8"
    hook.before_val_epoch(runner)
    assert runner.lines().count("Exp name: digits") == count


def test_the_units_are_said_once_and_not_for_lines_of_ones_own(new_runner: Callable[..., Any]) -> None:
    class Terse(LogProcessor):
        def get_log_after_iter(self, runner: Any, batch_idx: int, mode: Any) -> tuple[dict[str, Any], str]:
            return {}, "terse"

    for processor, expected in ((LogProcessor(), 1), (Terse(), 0)):
        runner = new_runner(log_processor=processor, log_dir=f"{new_runner().log_dir}_{expected}")
        hook = LoggerHook(tables=False)
        hook.before_train(runner)
        hook.before_test_epoch(runner)
        line = "In the lines below: time and data_time in seconds per iteration, memory in MiB (largest resident set of the process)"
        assert runner.lines().count(line) == expected


def test_processes_with_the_same_samples_have_no_mean_of_the_loss(new_runner: Callable[..., Any]) -> None:
    said = units(new_runner(world_size=2))  # of one shard of the data
    assert said.endswith("(largest resident set of the process); times and memory are those of rank 0")


def test_records_have_the_step_that_mmengine_gives_them(runner: Any) -> None:
    hook, reporter = LoggerHook(tables=False), runner.reporters[0]
    hook.before_run(runner)
    logged_at(hook, runner)
    runner.epoch, runner.iter = 1, 10
    runner.message_hub.update_scalar("val/accuracy", 0.5)
    hook.before_val_epoch(runner)
    hook.after_val_epoch(runner)
    hook.log_metric_by_epoch = False
    hook.after_val_epoch(runner)
    runner.log_processor.by_epoch, hook.log_metric_by_epoch = False, True
    hook.after_val_epoch(runner)
    hook.after_run(runner)
    assert [event[:2] for event in reporter.events] == [
        ("start", {"max_epochs": 2}),
        ("train", 10),
        ("val", 1),
        ("val", 10),
        ("val", 10),
        ("close",),
    ]


def test_other_ranks_write_nothing(new_runner: Callable[..., Any]) -> None:
    runner = new_runner(rank=1)
    hook = LoggerHook(tables=False, progress_bar=True)
    hook.before_run(runner)
    logged_at(hook, runner)
    runner.message_hub.update_scalar("test/accuracy", 0.5)
    hook.after_test_epoch(runner)
    hook.after_run(runner)
    assert runner.reporters[0].events == []
    assert not Path(runner.log_dir).exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(interval="100"), "LoggerHook.interval: '100' is not allowed, give 1 or more"),
        (dict(interval=0), "LoggerHook.interval: 0 is not allowed, give 1 or more"),
        (dict(interval_exp_name="1"), "LoggerHook.interval_exp_name: '1' is not allowed, give 1 or more"),
        (dict(lines="no"), "LoggerHook.lines: 'no' is not allowed, give True, False or None"),
        (dict(ignore_last="no"), "LoggerHook.ignore_last: 'no' is not allowed, give True or False"),
        (dict(out_dir=1), "LoggerHook.out_dir: 1 is not allowed, give a folder"),
        (dict(out_suffix=[1]), r"LoggerHook.out_suffix: \(1,\) is not allowed, give endings of names"),
        (dict(interval_exp_name=0), "LoggerHook.interval_exp_name: 0 is not allowed, give 1 or more"),
        (dict(keep_local=False), "LoggerHook.keep_local: False has no meaning without out_dir.*"),
        (
            dict(backend_args={"backend": "petrel"}),
            "LoggerHook.backend_args: has no meaning here, files are written to.*",
        ),
        (dict(file_client_args={}), "LoggerHook.file_client_args: has no meaning here.*"),
    ],
)
def test_wrong_arguments_are_named_where_the_hook_is_made(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}$"):
        LoggerHook(**options)


def test_metrics_of_a_test_are_left_as_a_file(runner: Any) -> None:
    runner.message_hub.update_scalar("test/accuracy", 0.5)
    runner.message_hub.update_info("test/table", torch.eye(2))
    LoggerHook().after_test_epoch(runner)
    written = json.loads((Path(runner.log_dir) / f"{runner.timestamp}.json").read_text())
    assert written == {"accuracy": 0.5, "table": [[1.0, 0.0], [0.0, 1.0]]}
    assert runner.reporters[0].events == []


@pytest.mark.parametrize("keep_local", [True, False])
def test_logs_are_copied_at_the_end(runner: Any, tmp_path: Path, keep_local: bool) -> None:
    log_dir = Path(runner.log_dir)
    (log_dir / "vis_data").mkdir()
    (log_dir / "vis_data" / "scalars.json").write_text("{}")
    (log_dir / "weights.bin").write_text("large")
    LoggerHook(out_dir=tmp_path / "out", keep_local=keep_local).after_run(runner)
    copies = tmp_path / "out" / Path(runner.work_dir).name / runner.timestamp
    names = {str(path.relative_to(copies)) for path in copies.rglob("*") if path.is_file()}
    assert names == {"vis_data/scalars.json", f"{runner.timestamp}.log"}
    assert (log_dir / "vis_data" / "scalars.json").exists() == keep_local
    assert (log_dir / "weights.bin").exists()


def test_a_real_run_writes_the_lines_of_the_seeds(new_run: Callable[..., FlexibleRunner]) -> None:
    run = new_run(
        scores=[10.0, 20.0, 30.0], train_cfg={"by_epoch": True, "max_epochs": 2}, param_scheduler={"type": "LinearLR"}
    )
    run.train()
    log = (Path(run.log_dir) / f"{run.timestamp}.log").read_text().splitlines()
    stamp = r"\d\d/\d\d \d\d:\d\d:\d\d - flextrain - INFO - "
    figures = r"eta: 0:00:\d\d  time: 0\.\d{4}  data_time: 0\.\d{4}  memory: \d+  loss: 0\.\d{4}"
    train = rf"{stamp}Epoch\(train\) \[1\]\[10/10\]  lr: 3\.3333e-02  {figures}"
    assert any(re.fullmatch(train, line) for line in log)
    val = rf"{stamp}Epoch\(val\) \[1\]\[10/10\]    accuracy: 10\.0000  data_time: 0\.\d{{4}}  time: 0\.\d{{4}}"
    assert [line for line in log if "Epoch(val) [1][10/10]" in line] == [
        line for line in log if re.fullmatch(val, line)
    ]
    assert any(re.fullmatch(val, line) for line in log)
    records = [json.loads(line) for line in (Path(run.log_dir) / "vis_data/scalars.json").read_text().splitlines()]
    assert [record["step"] for record in records] == [10, 1, 20, 2]
    assert list(records[0]) == ["lr", "data_time", "time", "loss", "epoch", "iter", "memory", "step"]
    assert list(records[1]) == ["accuracy", "data_time", "time", "step"]
    config = json.loads((Path(run.log_dir) / "vis_data/config.json").read_text())
    assert config["train_cfg"] == {"by_epoch": True, "max_epochs": 2}
    run.val()
    whole = (Path(run.log_dir) / f"{run.timestamp}.log").read_text()
    assert whole.count("Exp name: ") == whole.count("In the lines below: ") == 1, "over all that a program does with it"


def twenty_five_batches() -> Iterator[dict[str, Tensor]]:
    for _ in range(25):
        yield {"inputs": torch.ones(4, 4), "targets": torch.zeros(4, dtype=torch.int64)}


def test_a_pass_of_unknown_length_has_all_its_lines(new_run: Callable[..., FlexibleRunner]) -> None:
    run = new_run(val_dataloader=twenty_five_batches, default_hooks={"checkpoint": None})
    for _ in range(2):
        run.val()
    log = (Path(run.log_dir) / f"{run.timestamp}.log").read_text()
    assert len(re.findall(r"Epoch\(val\) \[\d+\]?\[?[12]0/", log)) == 4, log


class Reads(TorchDispatchMode):
    """Counts the operators that bring a scalar to the host."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.name() == "aten::_local_scalar_dense"
        return func(*args, **(kwargs or {}))


def test_training_reads_no_scalar_one_by_one(new_run: Callable[..., FlexibleRunner]) -> None:
    optim = {"optimizer": {"type": "SGD", "lr": 0.1}, "clip_grad": {"max_norm": 1.0}}
    run = new_run(
        optim_wrapper=optim,
        default_hooks={"logger": {"interval": 2}, "checkpoint": None},
        **dict.fromkeys(("val_dataloader", "val_cfg", "val_evaluator")),
    )
    with Reads() as reads:
        run.train()
    assert reads.count == 1, "of the weights, when training has ended"
    with Reads() as reads:
        torch.ones(()).item()
    assert reads.count == 1, "or the look sees nothing"


def test_the_bar_is_taken_away_when_training_fails(
    new_run: Callable[..., FlexibleRunner], capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")

    class Failing(LoggerHook):
        def after_val_epoch(self, runner: Any, metrics: Any = None) -> None:
            raise RuntimeError("in validation")

    run = new_run(default_hooks={"logger": Failing(progress_bar=True), "checkpoint": None})
    with pytest.raises(RuntimeError, match="in validation"):
        run.train()
    shown = capsys.readouterr().out
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1
    assert "Epoch 1/3" in shown


def _losses_in_log_lines(folder: str) -> tuple[list[float], list[float]]:
    """What one rank sees of the loss at each log line, and its own losses."""
    rank = collectives.get_rank()
    own: list[float] = []
    seen: list[float] = []

    class Watch(LoggerHook):
        def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
            own.append(float(outputs["loss"]))
            super().after_train_iter(runner, batch_idx, data_batch, outputs)

        def _report(self, runner: Any, record: dict[str, Any], step: int, mode: str) -> None:
            seen.append(record["loss"])

    run = make_run(
        Path(folder),
        train_cfg={"by_epoch": True, "max_epochs": 2},
        default_hooks={"logger": Watch(interval=2, ignore_last=False), "checkpoint": None},
        log_processor={"window_size": 3},
        randomness={"seed": rank},
        launcher="pytorch",
        **dict.fromkeys(("val_dataloader", "val_cfg", "val_evaluator")),
    )
    run.train()
    said = units(run)
    run.strategy.leave()
    return seen, own, said


@pytest.mark.distributed
def test_the_loss_in_a_line_is_the_mean_over_ranks(workers2: WorkerGroup, tmp_path: Path) -> None:
    (seen, first, said), (seen_too, second, _) = workers2.run(_losses_in_log_lines, str(tmp_path))
    both = [(a + b) / 2 for a, b in zip(first, second, strict=True)]
    ends = [2, 4, 5, 7, 9, 10]
    assert seen == pytest.approx([sum(both[max(0, end - 3) : end]) / min(3, end) for end in ends], rel=1e-6)
    assert seen == seen_too
    assert first != second
    assert said.endswith("; loss is the mean over the 2 processes, times and memory are those of rank 0")


def test_lines_of_a_fast_loop_wait_for_each_other_and_for_nobody_else(
    runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(monotonic=lambda: clock.now, now=100.0)
    monkeypatch.setattr(line_queue, "time", clock)
    runner.train_loop.epoch_length = 1000
    hook = LoggerHook(tables=False, interval=1)
    hook.before_run(runner)
    hook.before_train(runner)
    hook.before_train_epoch(runner)
    steps = lambda: [event[1] for event in runner.reporters[0].events if event[0] == "train"]  # noqa: E731

    def iteration(seconds: float) -> None:
        runner.message_hub.update_scalar("train/loss", float(runner.iter))
        hook.after_train_iter(runner, runner.iter)
        runner.iter += 1
        clock.now += seconds

    iteration(0.005)
    assert steps() == [1], "the first line has nothing to wait for"
    iteration(0.005)
    iteration(0.005)
    assert steps() == [1]
    runner.logger.info("from a hook")
    assert steps() == [1, 2, 3]
    assert [re.sub(r".*loss: ", "", line) for line in runner.lines()][-3:] == ["0.5000", "1.0000", "from a hook"]
    for _ in range(8):
        iteration(0.005)
    assert steps() == [1, 2, 3]
    for _ in range(6):
        iteration(0.005)
    assert 3 < len(steps()) < runner.iter, "held back for 0.05 s and not longer"
    for _ in range(3):
        iteration(0.02)
    assert steps() == list(range(1, runner.iter + 1)), "a slower loop shows every line at once"
    iteration(0.0)
    iteration(0.0)
    assert len(steps()) < runner.iter
    hook.after_train_epoch(runner)
    assert len(steps()) == runner.iter
    iteration(0.0)
    hook.on_exception(runner, RuntimeError())
    assert len(steps()) == runner.iter, "a run that fails has written all its lines"
    assert hook._lines not in runner.logger.filters


def test_a_log_processor_of_ones_own_makes_the_lines(new_run: Callable[..., FlexibleRunner]) -> None:
    class Terse(LogProcessor):
        def get_log_after_iter(self, runner: Any, batch_idx: int, mode: Any) -> tuple[dict[str, Any], str]:
            record, _ = super().get_log_after_iter(runner, batch_idx, mode)
            return {**record, "own": 1}, f"terse {mode} {batch_idx + 1} seen at {runner.iter + 1}"

    run = new_run(log_processor=Terse(), train_cfg={"by_epoch": True, "max_epochs": 1})
    run.train()
    text = Path(run.log_dir, f"{run.timestamp}.log").read_text()
    assert re.findall("terse train.*", text) == ["terse train 10 seen at 10"]


def test_validation_by_a_hook_leaves_the_record_open(new_run: Callable[..., FlexibleRunner]) -> None:
    class Validates(Hook):
        def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
            if runner.iter == 4:
                runner.val()

    run = new_run(custom_hooks=[Validates()], default_hooks={"logger": {"interval": 5}, "checkpoint": None})
    run.train()
    records = [json.loads(line) for line in Path(run.log_dir, "vis_data", "scalars.json").read_text().splitlines()]
    assert [record["iter"] for record in records if "loss" in record] == [5, 10, 15, 20, 25, 30]


def test_a_failing_reporter_hides_nothing(new_run: Callable[..., FlexibleRunner]) -> None:
    class Fails(Reporter):
        closed = False

        def on_scalars(self, scalars: Any, step: int, mode: str) -> None:
            raise OSError("disk full")

        def close(self) -> None:
            self.closed = True

    class Stops(Hook):
        priority = "LOWEST"
        told: BaseException | None = None

        def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
            if runner.iter == 3:
                raise RuntimeError("the cause")

        def on_exception(self, runner: Any, exception: BaseException) -> None:
            self.told = exception

    reporter, stops = Fails(), Stops()
    run = new_run(custom_hooks=[stops], visualizer=[reporter], default_hooks={"logger": {"interval": 3}})
    filters = list(run.logger.filters)
    with pytest.raises((RuntimeError, OSError)) as caught:
        run.train()
    assert stops.told is caught.value
    assert reporter.closed
    assert run.logger.filters == filters


# The summary at the end


def closing(run: FlexibleRunner) -> list[str]:
    """The log after the last line of a validation or a saved checkpoint."""
    log = Path(run.log_dir, f"{run.timestamp}.log").read_text().splitlines()
    lines = [line.partition(" - INFO - ")[2] for line in log]
    (first,) = (i for i, line in enumerate(lines) if line.startswith("Trained "))
    return lines[first:]


def test_training_ends_with_what_was_done_what_was_best_and_what_to_use_next(
    new_run: Callable[..., FlexibleRunner], tmp_path: Path
) -> None:
    run = new_run(
        scores=[10.0, 30.0, 20.0],
        train_cfg={"by_epoch": True, "max_epochs": 3},
        default_hooks={"checkpoint": {"save_best": "accuracy"}},
    )
    run.train()
    trained, best, last = closing(run)
    assert re.fullmatch(
        r"Trained 3 epochs \(30 iterations\) in \d\.\d\d s, [\d.]+ samples/s without validation", trained
    )
    folder = run.work_dir
    assert best == f"Best accuracy: 30.0000 at epoch 2, load_from='{folder}/best_accuracy_epoch_2'"
    assert last == f"Last checkpoint: {folder}/epoch_3, resume=True continues from it"
    again = new_run(
        scores=[20.0, 25.0],
        train_cfg={"by_epoch": True, "max_epochs": 4},
        resume=True,
        default_hooks={"checkpoint": {"save_best": "accuracy"}},
    )
    again.train()
    trained, best, last = closing(again)
    assert trained.startswith("Trained 1 epoch (10 iterations) in ")
    assert best == f"Best accuracy: 30.0000, load_from='{folder}/best_accuracy_epoch_2'", "of the earlier life"
    assert last == f"Last checkpoint: {folder}/epoch_4, resume=True continues from it"


def test_without_save_best_the_summary_says_how_to_keep_the_best(new_run: Callable[..., FlexibleRunner]) -> None:
    run = new_run(scores=[10.0, 30.0, 20.0], default_hooks={"checkpoint": None})
    run.train()
    _, best = closing(run)
    assert best == 'Best accuracy: 30.0000 at epoch 2, save_best="accuracy" of CheckpointHook would keep its weights'


def test_validation_does_not_count_as_training_and_its_last_batch_not_as_a_whole_one(
    runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(monotonic=lambda: clock.now, now=100.0)
    monkeypatch.setattr(closing_summary, "time", clock)
    runner.train_loop.data = SimpleNamespace(num_samples=75, epoch_length=10, drop_last=False)
    summary = closing_summary.ClosingSummary(runner)
    clock.now += 10
    summary.validation_begins()
    clock.now += 50
    runner.epoch, runner.iter = 1, 10
    summary.validation_ends({"name": "x", "temperature": 3.0, "loss": 2.0, "acc": 1.0})
    assert next(summary.lines()) == "Trained 1 epoch (10 iterations) in 0:01:00, 7.50 samples/s without validation"
    runner.epoch, runner.iter = 2, 20
    summary.validation_ends({"loss": 3.0})
    assert [line for line in summary.lines() if "Best" in line] == [
        'Best loss: 2.0000 at epoch 1, save_best="loss" of CheckpointHook would keep its weights'
    ]


def test_only_a_training_is_summed_up(new_run: Callable[..., FlexibleRunner]) -> None:
    run = new_run()
    run.val()
    assert "Trained" not in Path(run.log_dir, f"{run.timestamp}.log").read_text()


def test_a_checkpoint_of_an_earlier_run_is_not_taken_for_this_ones(new_run: Callable[..., FlexibleRunner]) -> None:
    earlier = new_run(train_cfg={"by_epoch": True, "max_epochs": 1}, default_hooks={"checkpoint": {}})
    earlier.train()
    run = new_run(train_cfg={"by_epoch": True, "max_epochs": 1}, default_hooks={"checkpoint": None})
    assert run.work_dir == earlier.work_dir
    run.train()
    folder = run.work_dir
    assert closing(run)[-1] == f"This run saved no checkpoint to resume from; {folder}/epoch_1 was there before it"


def test_a_checkpoint_of_a_relative_folder_is_this_runs(
    new_run: Callable[..., FlexibleRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Saves(Hook):
        def after_train(self, runner: Any) -> None:
            runner.save_checkpoint(Path(runner.work_dir).name, "mine")

    run = new_run(custom_hooks=[Saves()], default_hooks={"checkpoint": None})
    monkeypatch.chdir(Path(run.work_dir).parent)
    run.train()
    assert closing(run)[-1] == f"Last checkpoint: {run.work_dir}/mine, resume=True continues from it"


@pytest.mark.parametrize("content", ["unreadable", "gone"])
def test_a_folder_that_cannot_be_read_does_not_fail_a_finished_run(
    new_run: Callable[..., FlexibleRunner], monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    class Spoils(Hook):
        priority = "VERY_LOW"

        def after_train(self, runner: Any) -> None:
            if content == "gone":
                (Path(runner.work_dir) / "latest").write_text("epoch_9")
                return

            def fails(folder: Any) -> None:
                raise OSError(5, "Input/output error")

            monkeypatch.setattr(closing_summary, "find_latest", fails)

    run = new_run(custom_hooks=[Spoils()])
    run.train()
    (warning,) = [
        line
        for line in Path(run.log_dir, f"{run.timestamp}.log").read_text().splitlines()
        if "The last checkpoint is not known" in line
    ]
    assert " - WARNING - " in warning
    assert ("Input/output error" if content == "unreadable" else "epoch_9") in warning
