"""Two runs never share a folder without knowing: not their checkpoints, not at the same time, not their logs."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from flextrain import FlexibleRunner
from flextrain.core.base.errors import ConfigError, StorageError
from flextrain.core.base.events import read_events
from flextrain.core.checkpoint.folders import FILE, FolderLock, OccupiedError, owner_of
from flextrain.report.recorded_run import recorded_run
from flextrain.report.run_facts import state_of
from flextrain.runner.hooks import Hook
from flextrain.testing import WorkerGroup

from .training import make_runner, refuses, validation

pytestmark = pytest.mark.usefixtures("quick")


def run(folder: Path, epochs: int = 2, overwrite: bool = False, **changes: Any) -> FlexibleRunner:
    hooks = dict(checkpoint=dict(interval=1, overwrite=overwrite) | changes.pop("hook", {}))
    return make_runner(folder, train_cfg=dict(max_epochs=epochs), default_hooks=hooks, **changes)


def written(folder: Path) -> dict[str, int]:
    """When each checkpoint was."""
    return {path.parent.name: path.stat().st_mtime_ns for path in folder.glob("epoch_*/manifest.json")}


class Asks(Hook):
    """Looks, in the middle of training, whether another run can have the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.said = folder, ""

    def before_train(self, runner: FlexibleRunner) -> None:
        with pytest.raises(OccupiedError) as caught:
            FolderLock(self.folder)
        self.said = str(caught.value)
        assert owner_of(self.folder) is None, "and it does not lose the folder by having looked"
        code = f"from flextrain.core.checkpoint.folders import FolderLock; from pathlib import Path; FolderLock(Path({str(self.folder)!r}))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        self.other = done.stderr


# One after the other


def test_checkpoints_of_another_run_stay(tmp_path: Path) -> None:
    run(tmp_path).train()
    before = written(tmp_path)
    with refuses(
        ConfigError,
        exactly=f"work_dir: {tmp_path} holds checkpoints of another run (epoch_1, epoch_2), which this one would replace; "
        "resume=True continues that run, another work_dir keeps it, default_hooks=dict(checkpoint=dict(overwrite=True)) "
        "replaces it",
    ):
        run(tmp_path).train()
    assert written(tmp_path) == before
    assert state_of(recorded_run(tmp_path, "")) == "finished"
    run(tmp_path, 3, resume=True).train()
    assert [event["iter"] for event in read_events(tmp_path) if event["event"] == "started"] == [0, 14]
    run(tmp_path, 3, overwrite=True).train()
    assert not written(tmp_path).items() & before.items()


class Clears(Hook):
    """Writes a file of its own, from the beginning where training begins."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def before_train(self, runner: FlexibleRunner) -> None:
        self.file.write_text(f"from {runner.iter}")


def test_a_refused_start_comes_to_no_hook(tmp_path: Path) -> None:
    file = tmp_path / "mine"
    run(tmp_path, custom_hooks=[Clears(file)]).train()
    file.write_text("the whole run")
    with pytest.raises(ConfigError, match="holds checkpoints of another run"):
        run(tmp_path, custom_hooks=[Clears(file)]).train()
    assert file.read_text() == "the whole run"


def test_a_used_folder_is_refused_whatever_the_names_are(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A shorter run would move ``latest`` back."""
    by_iter = dict(
        train_cfg=dict(by_epoch=False, max_iters=2), default_hooks=dict(checkpoint=dict(by_epoch=False, interval=2))
    )
    run(tmp_path, 3, hook=dict(save_best="accuracy"), **validation()).train()
    for path in ("epoch_1", "epoch_2"):
        (tmp_path / path).rename(tmp_path / f"kept_{path}")  # the user's own by now
    (best,) = (path.name for path in tmp_path.glob("best_*"))
    for load_from in (None, str(tmp_path / "epoch_3")):
        with pytest.raises(ConfigError, match=rf"holds checkpoints of another run \(epoch_3, {best}\), which"):
            make_runner(tmp_path, load_from=load_from, **by_iter).train()
    assert (tmp_path / "latest").read_text() == "epoch_3"
    run(tmp_path, 3, resume=True).train()  # nothing is left to do, and nothing in the way
    by_iter["default_hooks"]["checkpoint"]["overwrite"] = True  # type: ignore[index]
    caplog.set_level("WARNING", logger="flextrain")
    said = make_runner(tmp_path, log_level="WARNING", **by_iter)
    said.logger.addHandler(caplog.handler)
    said.train()
    said.logger.removeHandler(caplog.handler)
    assert (
        f"{tmp_path} holds checkpoints of another run: epoch_3, {best} will be replaced by the first one" in caplog.text
    )
    assert {path.parent.name for path in tmp_path.glob("*/manifest.json")} == {"iter_2", "kept_epoch_1", "kept_epoch_2"}


def test_a_run_that_goes_on_from_an_older_checkpoint_says_what_is_newer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, 3).train()
    again = run(tmp_path, 2, resume=tmp_path / "epoch_1", log_level="WARNING")
    again.logger.addHandler(caplog.handler)
    again.train()
    again.logger.removeHandler(caplog.handler)
    assert (
        f"{tmp_path} holds epoch_2, epoch_3, of which this run, going on at iteration 7, knows nothing" in caplog.text
    )
    assert (tmp_path / "latest").read_text() == "epoch_2"


def test_a_run_that_goes_on_from_elsewhere_replaces_nothing_either(tmp_path: Path) -> None:
    folder, other = tmp_path / "folder", tmp_path / "other"
    run(folder, 3).train()
    run(other, 1).train()
    before = written(folder)
    with pytest.raises(
        ConfigError, match=r"of another run \(epoch_1, epoch_2, epoch_3\), which this one would replace"
    ):
        run(folder, 3, resume=other / "epoch_1").train()
    assert written(folder) == before
    run(folder, 3, resume=folder / "epoch_1").train()  # back to an earlier place of the same run
    onward = run(tmp_path / "new", 3, resume=other / "epoch_1", hook=dict(max_keep_ckpts=1))
    onward.train()
    onward.train()  # what is there now is its own
    assert written(tmp_path / "new").keys() == {"epoch_3"}


def test_the_best_ones_too(tmp_path: Path) -> None:
    hook: dict[str, Any] = dict(interval=-1, save_last=False, save_best="accuracy")
    run(tmp_path, hook=hook, **validation()).train()
    (best,) = tmp_path.glob("best_*")
    with pytest.raises(ConfigError, match=rf"of another run \({best.name}\)"):
        run(tmp_path, hook=hook, **validation()).train()


def both_ranks_hear(folder: Path) -> str:
    runner = run(folder, resume=False)
    with pytest.raises(ConfigError) as caught:
        runner.train()
    runner.strategy.leave()
    return str(caught.value)


@pytest.mark.distributed
def test_all_processes_hear_it(workers2: WorkerGroup, tmp_path: Path) -> None:
    run(tmp_path).train()
    first, second = workers2.run(both_ranks_hear, tmp_path)
    assert first == second
    assert "holds checkpoints of another run (epoch_1, epoch_2)" in first


def both_ranks_hear_that_storage_fails(folder: Path) -> str:
    runner = run(folder)
    glob = Path.glob

    def failing(self: Path, pattern: str) -> Any:
        if runner.rank == 0 and self == folder:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return glob(self, pattern)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "glob", failing)
        with pytest.raises(StorageError) as caught:
            runner.train()
    runner.strategy.leave()
    return str(caught.value)


@pytest.mark.distributed
def test_all_processes_hear_that_the_folder_cannot_be_looked_into(workers2: WorkerGroup, tmp_path: Path) -> None:
    said = workers2.run(both_ranks_hear_that_storage_fails, tmp_path)
    assert said == [f"{tmp_path}: cannot be looked into, {os.strerror(errno.ESTALE)}"] * 2


# At the same time


@pytest.mark.processes
def test_one_run_at_a_time(tmp_path: Path) -> None:
    asks = Asks(tmp_path)
    run(tmp_path, custom_hooks=[asks]).train()
    assert asks.said == f"another run of this process ({os.getpid()})"
    assert re.search(rf"OccupiedError: process {os.getpid()} on .+ since \d\d/", asks.other)
    assert not (tmp_path / FILE).exists()
    FolderLock(tmp_path).release()


def test_the_line_for_users(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    with refuses(
        ConfigError,
        exactly=f"work_dir: {tmp_path} is where another run trains at the moment: another run of this process ({os.getpid()}); "
        "give another one, or wait until that has ended",
    ):
        run(tmp_path).train()
    lock.release()
    first = run(tmp_path)
    run(tmp_path).train()  # that the first one exists is in nobody's way
    first.strategy.leave()


def test_checkpoints_elsewhere_are_kept_apart_too(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "a").mkdir(parents=True)
    lock = FolderLock(elsewhere / "a")
    with pytest.raises(ConfigError, match=rf"work_dir: {elsewhere}/a is where another run trains"):
        run(tmp_path / "a", hook=dict(out_dir=str(elsewhere))).train()
    lock.release()


def test_evaluation_beside_a_training_is_allowed(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    assert run(tmp_path, **validation()).val()["count"] == 10
    lock.release()


def test_a_failed_run_leaves_the_folder_to_others(tmp_path: Path) -> None:
    class Fails(Hook):
        def before_train(self, runner: FlexibleRunner) -> None:
            raise ValueError

    with pytest.raises(ValueError):
        run(tmp_path, custom_hooks=[Fails()]).train()
    FolderLock(tmp_path).release()


HOLDS = """
import os, sys, time
from pathlib import Path
from flextrain.core.checkpoint.folders import FolderLock
lock = FolderLock(Path(sys.argv[1]))
if os.fork() == 0:  # a process that reads data, and is still there for a while
    time.sleep(30)
print("held", flush=True)
time.sleep(30)
"""


@pytest.mark.processes
def test_a_killed_run_leaves_the_folder_to_others(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path)], stdout=subprocess.PIPE, start_new_session=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(OccupiedError, match=f"process {holder.pid} on "):
        FolderLock(tmp_path)
    holder.kill()
    holder.wait()
    FolderLock(tmp_path).release()
    os.killpg(holder.pid, signal.SIGKILL)
    holder.stdout.close()


def test_a_file_that_is_removed_as_it_is_opened_holds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, open_file = [], os.open

    def opening(path: Path, *arguments: Any, **options: Any) -> int:
        descriptor = open_file(path, *arguments, **options)
        if not opened:  # its former owner lets go of it
            path.unlink()
        opened.append(path)
        return descriptor

    monkeypatch.setattr(os, "open", opening)
    lock = FolderLock(tmp_path)
    assert opened == [tmp_path / FILE] * 2
    assert (tmp_path / FILE).exists()
    lock.release()


@pytest.mark.full
@pytest.mark.processes
def test_of_many_at_once_one_has_it(tmp_path: Path) -> None:
    """Whoever opens the file as it is removed must not hold a file that is not there any more."""
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom flextrain.core.checkpoint.folders import FolderLock, OccupiedError\n"
        "folder = Path(sys.argv[1])\nend = time.time() + 1.5\n"
        "while time.time() < end:\n"
        "    try:\n        lock = FolderLock(folder)\n    except OccupiedError:\n        continue\n"
        "    (folder / 'mine').touch(exist_ok=False)\n    (folder / 'mine').unlink()\n    lock.release()\n"
    )
    started = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)]) for _ in range(3)]
    assert [process.wait(60) for process in started] == [0, 0, 0]


# Logs


def test_runs_of_the_same_second_have_logs_of_their_own(tmp_path: Path) -> None:
    folders = []

    def make() -> None:
        for _ in range(3):
            runner = make_runner(tmp_path)
            folders.append(runner.log_dir)

    threads = [threading.Thread(target=make) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(folders)) == 6
    assert all(Path(folder).is_dir() for folder in folders)
    assert all(re.fullmatch(r"\d{8}_\d{6}(_\d+)?", Path(folder).name) for folder in folders)
