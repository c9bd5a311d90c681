"""A process that `flextrain run` restarts: what it goes on with, and what it writes down."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from flextrain import CheckpointError, Hook
from flextrain.core.base.events import JOB, PROGRESS, RESTARTS, Progress, ProgressFile, read_events, read_progress
from flextrain.runner.resume.choose_checkpoint import GoBack

from .training import At, Samples, Stop, make_runner

pytestmark = pytest.mark.usefixtures("quick")

SAVING = dict(checkpoint=dict(by_epoch=False, interval=2))


def iterations(number: int) -> dict[str, Any]:
    return dict(train_cfg=dict(by_epoch=False, max_iters=number), default_hooks=SAVING)


OVERWRITING = dict(default_hooks=dict(checkpoint=dict(by_epoch=False, interval=2, overwrite=True)))


def started_at(folder: Path) -> list[int]:
    return [event["iter"] for event in read_events(folder) if event["event"] == "started"]


@pytest.mark.parametrize("says", [{}, {"resume": False}, {"resume": dict(optimizer=False)}, {"load_from": "other"}])
def test_a_restart_goes_on_from_its_job_s_newest_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: dict[str, Any]
) -> None:
    if "load_from" in says:
        make_runner(tmp_path / "other", **iterations(2)).train()
        says = {"load_from": str(tmp_path / "other" / "iter_2")}
    monkeypatch.setenv(JOB, "mine")
    make_runner(tmp_path / "run", **iterations(4), **says).train()
    monkeypatch.setenv(RESTARTS, "1")
    runner = make_runner(tmp_path / "run", log_level="INFO", **iterations(6), **says)
    runner.train()
    assert started_at(tmp_path / "run") == [0, 4]
    assert "iter_4: epoch 0, iteration 4" in Path(runner.log_dir, f"{runner.timestamp}.log").read_text()


@pytest.mark.parametrize(("says", "begins"), [(False, 0), (True, 4)])
def test_checkpoints_of_an_older_run_in_the_folder_are_the_script_s_affair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: bool, begins: int
) -> None:
    """The job failed before it had saved anything."""
    make_runner(tmp_path, **iterations(4)).train()
    monkeypatch.setenv(JOB, "mine")
    monkeypatch.setenv(RESTARTS, "1")
    make_runner(tmp_path, resume=says, **{**iterations(5), **OVERWRITING}).train()
    assert started_at(tmp_path) == [0, begins]


class Look(Hook):
    """Reads the progress file after the third update, waiting for the thread that writes it."""

    def __init__(self, path: Path) -> None:
        self.path, self.seen = path, read_progress(path)

    def after_train_iter(self, runner: Any, *args: Any, **kwargs: Any) -> None:
        while runner.iter + 1 == 3 and self.seen.iter < 2:
            self.seen = read_progress(self.path)


def test_progress_is_told_during_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROGRESS, str(tmp_path / "progress"))
    monkeypatch.setenv("LOCAL_RANK", "0")
    look = Look(tmp_path / "progress")
    make_runner(tmp_path / "run", custom_hooks=[look], **iterations(4)).train()
    assert (look.seen.work_dir, look.seen.began) == (str(tmp_path / "run"), 0)
    assert read_progress(look.path).iter == 4


def test_the_last_update_is_what_the_progress_file_says_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the thread has looked before it, and writes late."""
    has_looked, has_ended = threading.Event(), threading.Event()

    class Late(ProgressFile):
        def write(self, progress: Progress) -> None:
            if progress.iter == 3 and threading.current_thread() is not threading.main_thread():
                has_looked.set()
                has_ended.wait(0.5)
            super().write(progress)
            if progress.iter == 4:
                has_ended.set()

    class Await(Hook):
        def after_train_iter(self, runner: Any, *args: Any, **kwargs: Any) -> None:
            assert runner.iter < 3 or has_looked.wait(30)

    monkeypatch.setattr("flextrain.runner.health.oversight.ProgressFile", Late)
    monkeypatch.setenv(PROGRESS, str(tmp_path / "progress"))
    monkeypatch.setenv("LOCAL_RANK", "0")
    before = set(threading.enumerate())  # other tests' too
    make_runner(tmp_path / "run", custom_hooks=[Await()], **iterations(4)).train()
    for thread in set(threading.enumerate()) - before:
        if thread.name == "flextrain-monitor":
            thread.join(30)
    assert read_progress(tmp_path / "progress").iter == 4


def test_updates_after_going_back_are_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run begins with update 5, goes back to update 2, and ends before it is where it began."""
    make_runner(tmp_path / "run", **iterations(4)).train()
    monkeypatch.setenv(PROGRESS, str(tmp_path / "progress"))
    monkeypatch.setenv("LOCAL_RANK", "0")

    def leave(runner: Any, *args: Any, **kwargs: Any) -> None:
        if runner.iter == 4:
            raise GoBack(tmp_path / "run" / "iter_2", "a test")
        if runner.iter == 3:
            raise Stop

    with pytest.raises(Stop):
        make_runner(
            tmp_path / "run", custom_hooks=[At("after_train_iter", leave)], resume=True, **iterations(9)
        ).train()
    told = read_progress(tmp_path / "progress")
    assert (told.began, told.iter) == (2, 3)


class Broken(Samples):
    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 5:
            raise ValueError("sample 5 is broken")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.full)])
def test_a_failure_is_an_event_with_its_samples(tmp_path: Path, workers: int) -> None:
    data = dict(
        dataset=Broken(8),
        batch_size=4,
        num_workers=workers,
        sampler=dict(type="DefaultSampler", shuffle=False),
        collate_fn="default_collate",
    )
    runner = make_runner(tmp_path, train_dataloader=data, **iterations(4))
    with pytest.raises(ValueError, match="sample 5"):
        runner.train()
    last = read_events(tmp_path)[-1]
    assert (last["event"], last["rank"], last["iter"]) == ("failed", 0, 1)
    assert last["samples"] == [4, 5, 6, 7]
    assert not last["follows"]
    assert "ValueError: sample 5 is broken" in last["reason"]


@pytest.mark.parametrize("error", [RuntimeError, CheckpointError])
def test_a_connection_that_broke_only_follows(tmp_path: Path, error: type[Exception]) -> None:
    class Fails(Hook):
        def after_train_iter(self, runner: Any, *args: Any, **kwargs: Any) -> None:
            raise error("gloo: Connection closed by peer [127.0.0.1]:1234")

    runner = make_runner(tmp_path, custom_hooks=[Fails()], **iterations(4))
    with pytest.raises(error):
        runner.train()
    assert read_events(tmp_path)[-1]["follows"]
