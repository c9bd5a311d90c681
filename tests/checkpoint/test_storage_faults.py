"""Storage that fails while a run trains: it goes on or ends with one line, and the last good checkpoint is always there."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flextrain import FlexibleRunner
from flextrain.core.base.errors import CheckpointError, ConfigError, StorageError
from flextrain.core.base.events import read_events
from flextrain.core.checkpoint import Checkpoint, complete_ones, find_latest, is_checkpoint
from flextrain.runner.hooks import CheckpointHook
from flextrain.runner.reporting import JsonLinesReporter, close_logger, setup_logger
from flextrain.strategies.parts import meet
from flextrain.testing import WorkerGroup

from ..runner.training import Watch, make_runner, validation
from ..waiting import wait_until
from .disks import fill_up, mounted, turn_read_only, turn_writable

BACKGROUND = pytest.mark.parametrize("background", [False, True], ids=["synchronous", "asynchronous"])


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    with mounted(tmp_path / "disk") as folder:
        yield folder


class At(Watch):
    """Does something before the first update of some epochs, counted from 1, when no save is in progress."""

    def __init__(self, **actions: Callable[[FlexibleRunner], object]) -> None:
        super().__init__()
        self.actions = actions

    def before_train_iter(self, runner: FlexibleRunner, batch_idx: int, data_batch: Any = None) -> None:
        super().before_train_iter(runner, batch_idx, data_batch)
        action = self.actions.get(f"epoch_{runner.epoch + 1}")
        if batch_idx == 0 and action is not None:
            wait_until(lambda: runner.finish_saving(wait=False))
            if runner.rank == 0:
                action(runner)
            meet(runner.strategy, "a fault")


def saving(background: bool = False, **options: Any) -> dict[str, Any]:
    return dict(checkpoint=dict(interval=1, async_save=background, **options))


def complete(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if is_checkpoint(path))


def failures(folder: Path) -> list[tuple[int, str]]:
    """The iteration and the checkpoint of each failed save in ``events.jsonl``."""
    return [(e["iter"], Path(e["path"]).name) for e in read_events(folder) if e["event"] == "save_failed"]


def opens(path: Path) -> bool:
    checkpoint = Checkpoint.open(path)
    checkpoint.load({key: torch.empty(info.shape, dtype=info.dtype) for key, info in checkpoint.tensors.items()})
    return True


def log_of(runner: FlexibleRunner) -> list[str]:
    return (Path(runner.log_dir) / f"{runner.timestamp}.log").read_text().splitlines()


def train(folder: Path, actions: dict[str, Any], epochs: int = 4, **options: Any) -> FlexibleRunner:
    """Train with actions at the begin of some epochs; ``options`` are those of CheckpointHook."""
    background = options.pop("background", False)
    runner = make_runner(
        folder,
        train_cfg=dict(max_epochs=epochs),
        default_hooks=saving(background, **options),
        custom_hooks=[At(**actions)],
        log_level="INFO",
    )
    runner.train()
    return runner


# A full disk that empties again


@BACKGROUND
def test_a_full_disk_that_empties_again(disk: Path, background: bool, capfd: pytest.CaptureFixture[str]) -> None:
    """The logs are on the disk too. The checkpoint before stays until the next one is complete."""
    folder = disk / "run"

    def look(runner: FlexibleRunner) -> None:
        assert complete(folder) == ["epoch_1"]
        assert find_latest(folder) == folder / "epoch_1"
        (disk / "filler").unlink()

    actions = dict(epoch_2=lambda runner: fill_up(disk, 0), epoch_4=look)
    runner = train(folder, actions, on_error="continue", max_keep_ckpts=1, background=background)
    assert complete(folder) == ["epoch_4"]
    assert opens(folder / "epoch_4")
    assert [path.name for path in folder.glob(".*")] == []
    out, err = capfd.readouterr()
    for epoch, more in ((2, ""), (3, ", 2 failures in a row")):
        says = f"epoch_{epoch}: could not be saved on rank 0: [Errno 28] No space left on device"
        (line,) = [line for line in out.splitlines() if says in line]
        assert f"WARNING - {folder}/{says}" in line
        assert "No space left on device: its file needs 592 bytes, and 0 bytes were free; " in line
        last = f"the last one saved is {folder}/epoch_1{more}"
        assert line.endswith(f'; training goes on (on_error="continue"), {last}')
    assert len([line for line in err.splitlines() if "log lines are lost, No space left on device" in line]) <= 1
    assert "Traceback" not in out + err
    assert log_of(runner)[-1].endswith("resume=True continues from it")


def on_a_full_disk(disk: Path, folder: Path, background: bool) -> tuple[list[str], list[str], int]:
    actions = dict(epoch_2=lambda runner: fill_up(disk, 2**14), epoch_3=lambda runner: (disk / "filler").unlink())
    runner = train(folder, actions, epochs=3, on_error="continue", out_dir=disk, background=background)
    saved = [name for name in ("epoch_1", "epoch_2", "epoch_3") if runner.has_saved(disk / "run" / name)]
    failed = [name for name in ("epoch_1", "epoch_2", "epoch_3") if runner.save_failed(disk / "run" / name)]
    runner.strategy.leave()
    return saved, failed, runner.iter


@pytest.mark.distributed
@BACKGROUND
def test_two_processes_go_on_alike(disk: Path, workers2: WorkerGroup, tmp_path: Path, background: bool) -> None:
    first, second = workers2.run(on_a_full_disk, disk, tmp_path / "run", background)
    assert first == second == (["epoch_1", "epoch_3"], ["epoch_2"], 12)
    assert failures(tmp_path / "run") == [(8, "epoch_2")]
    assert complete(disk / "run") == ["epoch_1", "epoch_3"]
    assert opens(disk / "run" / "epoch_3")


# A folder that turns read-only


@BACKGROUND
def test_it_ends_with_one_line_if_it_has_to(
    disk: Path, tmp_path: Path, background: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    actions = dict(epoch_2=lambda runner: turn_read_only(disk))
    with pytest.raises(StorageError, match=r"^\S*/epoch_2: could not be saved on rank 0: .*Read-only file system"):
        train(tmp_path / "run", actions, out_dir=disk, background=background)
    turn_writable(disk)
    assert opens(find_latest(disk / "run") or tmp_path)
    assert complete(disk / "run") == ["epoch_1"]
    lines = [line for line in capfd.readouterr().out.splitlines() if " - ERROR - Failed" in line]
    assert len(lines) == 1
    assert lines[0].endswith("; resume=True continues from epoch_1")


@BACKGROUND
def test_the_last_save_fails(disk: Path, tmp_path: Path, background: bool) -> None:
    """Training is done, and what runs after it too, before the error."""
    ran: list[str] = []

    class Ends(Watch):
        def after_run(self, runner: FlexibleRunner) -> None:
            ran.append("after_run")

    actions = dict(epoch_2=lambda runner: turn_read_only(disk))
    runner = make_runner(
        tmp_path / "run",
        train_cfg=dict(max_epochs=2),
        default_hooks=saving(background, on_error="continue", out_dir=disk),
        custom_hooks=[At(**actions), Ends()],
        **validation(),
    )
    last = (
        rf"^The last checkpoint is missing, training itself is done: {disk}/run/epoch_2: could not be saved on rank 0"
    )
    with pytest.raises(StorageError, match=last):
        runner.train()
    turn_writable(disk)
    assert ran == ["after_run"]
    assert (runner.epoch, runner.iter) == (2, 14)
    assert find_latest(disk / "run") == disk / "run" / "epoch_1"
    assert runner.val()["count"] == 10  # it was raised once
    resumed = make_runner(tmp_path / "run", resume=True, default_hooks=saving(out_dir=disk))
    resumed.train()
    assert resumed.epoch == 3


def test_the_best_that_could_not_be_saved_is_not_the_best(disk: Path, tmp_path: Path) -> None:
    """The next one has to be better than what is kept, or nothing would be kept at the end."""
    scores = iter([0.1, 0.9, 0.5, 0.2])

    class Scored(CheckpointHook):
        def after_val_epoch(self, runner: Any, metrics: Any = None) -> None:
            super().after_val_epoch(runner, {"accuracy": next(scores)})

    actions = dict(epoch_2=lambda runner: turn_read_only(disk), epoch_3=lambda runner: turn_writable(disk))
    hook = Scored(interval=1, async_save=True, out_dir=disk, on_error="continue", save_best="accuracy")
    runner = make_runner(
        tmp_path / "run",
        train_cfg=dict(max_epochs=4),
        default_hooks=dict(checkpoint=hook),
        custom_hooks=[At(**actions)],
        env_cfg=dict(dry_run=False),
        **validation(),
    )
    runner.train()
    assert hook.best_scores == {"accuracy": {"score": 0.5, "checkpoint": "best_accuracy_epoch_3"}}
    assert [name for name in complete(disk / "run") if "best" in name] == ["best_accuracy_epoch_3"]
    assert runner.message_hub.get_info("best_score") == 0.5


def test_a_better_one_comes_while_the_best_is_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What failed is put aside before the next one is the best; otherwise that would be put aside with it."""
    from flextrain.core.checkpoint import save as module

    write, scores, is_better = module.write_shard, iter([0.5, 0.9]), threading.Event()

    def written(path: Path, *args: Any) -> Any:
        if path.parent.name == ".best_accuracy_epoch_1.tmp":
            assert is_better.wait(60)
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, *args)

    class Scored(CheckpointHook):
        def after_val_epoch(self, runner: Any, metrics: Any = None) -> None:
            super().after_val_epoch(runner, {"accuracy": next(scores)})

        def _save_best(self, runner: Any, key: str, score: float, name: str) -> None:
            if score == 0.9:
                is_better.set()
            super()._save_best(runner, key, score, name)

    monkeypatch.setattr(module, "write_shard", written)
    hook = Scored(interval=-1, save_last=False, async_save=True, on_error="continue", save_best="accuracy")
    runner = make_runner(
        tmp_path,
        train_cfg=dict(max_epochs=2),
        default_hooks=dict(checkpoint=hook),
        env_cfg=dict(dry_run=False),
        **validation(),
    )
    runner.train()
    assert hook.best_scores == {"accuracy": {"score": 0.9, "checkpoint": "best_accuracy_epoch_2"}}
    assert runner.message_hub.get_info("best_score") == 0.9
    assert complete(tmp_path) == ["best_accuracy_epoch_2"]


# A folder that is deleted under a save


def test_a_folder_that_is_deleted_under_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it, while the second checkpoint is written; the third one is complete again."""
    from flextrain.core.checkpoint import save as module

    write, out_dir = module.write_shard, tmp_path / "out"

    def deleted(path: Path, *args: Any) -> Any:
        if path.parent.name == ".epoch_2.tmp":
            shutil.rmtree(out_dir)
        return write(path, *args)

    monkeypatch.setattr(module, "write_shard", deleted)
    runner = train(tmp_path / "run", {}, epochs=3, out_dir=out_dir, on_error="continue", background=True)
    assert complete(out_dir / "run") == ["epoch_3"]
    assert [name for _, name in failures(tmp_path / "run")] == ["epoch_2"]
    assert runner.has_saved(out_dir / "run" / "epoch_3")


# The clock goes back


def test_the_clock_goes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an hour with every epoch, for files too. Without ``latest``, the highest iteration is resumed, not the last file."""
    now, hours = time.time, [0]
    monkeypatch.setattr(time, "time", lambda: now() - 3600 * hours[0])

    class GoesBack(Watch):
        priority = "LOWEST"

        def after_train_epoch(self, runner: FlexibleRunner) -> None:
            hours[0] += 1
            os.utime(tmp_path / f"epoch_{runner.epoch + 1}" / "manifest.json", (time.time(),) * 2)

    options: dict[str, Any] = dict(default_hooks=saving(max_keep_ckpts=2), train_cfg=dict(max_epochs=4))
    make_runner(tmp_path, custom_hooks=[GoesBack()], **options).train()
    assert complete(tmp_path) == ["epoch_3", "epoch_4"]
    assert list(complete_ones(tmp_path).values()) == [21, 28]
    (tmp_path / "latest").unlink()
    again = make_runner(tmp_path, resume=True, **{**options, "train_cfg": dict(max_epochs=5)})
    again.train()
    assert again.train_loop.start_iter == 28


# Logs


def test_log_lines_that_are_lost_are_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    """Every write to ``/dev/full`` fails as on a full disk."""
    logger = setup_logger("INFO", "/dev/full")
    for _ in range(3):
        logger.info("a line")
    close_logger()
    out, err = capfd.readouterr()
    assert out.count("a line") == 3
    assert err == "flextrain: /dev/full: log lines are lost, No space left on device\n"


def test_a_log_whose_folder_is_gone_ends_no_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """logging opens a file again that was closed, before it handles errors."""
    logger = setup_logger("INFO", tmp_path / "run" / "it.log")
    next(handler for handler in logger.handlers if isinstance(handler, logging.FileHandler)).close()
    shutil.rmtree(tmp_path / "run")
    for _ in range(3):
        logger.info("a line")
    close_logger()
    assert capfd.readouterr().err.endswith("it.log: log lines are lost, No such file or directory\n")


def test_records_that_are_lost_are_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "scalars.json").symlink_to("/dev/full")
    reporter = JsonLinesReporter(tmp_path)
    reporter.on_start({})
    for step in range(3):
        reporter.on_scalars({"loss": 1.0}, step, "train")
    reporter.close()
    says = f"{tmp_path}/scalars.json: records are lost, No space left on device"
    assert [record.getMessage() for record in caplog.records] == [says]


# What does not go on


def test_what_is_no_fault_of_the_storage_ends_the_run(tmp_path: Path) -> None:
    class Adds(Watch):
        def before_save_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
            checkpoint["mine"] = {"a": {1, 2}}

    runner = make_runner(tmp_path, default_hooks=saving(on_error="continue"), custom_hooks=[Adds()])
    with pytest.raises(CheckpointError, match="mine.*cannot be saved") as raised:
        runner.train()
    assert not isinstance(raised.value, StorageError)
    assert runner.epoch == 0


def test_wrong_options(tmp_path: Path) -> None:
    allowed = 'is not allowed, choose "raise" or "continue"'
    with pytest.raises(
        ConfigError, match=f"^CheckpointHook.on_error: 'contine' {allowed}, did you mean \"continue\"\\?$"
    ):
        CheckpointHook(on_error="contine")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"^save_checkpoint.on_error: 3 {allowed}$"):
        make_runner(tmp_path).save_checkpoint(tmp_path, "a", on_error=3)  # type: ignore[arg-type]
