"""The second tier of checkpoints: the newest one of both is resumed, and only by the run that saved it."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flextrain import FlexibleRunner
from flextrain.core.base.errors import CheckpointError, ConfigError, StorageError
from flextrain.core.checkpoint import is_checkpoint
from flextrain.core.checkpoint import save as save_module
from flextrain.runner.hooks import CheckpointHook
from flextrain.testing import WorkerGroup

from ..runner.training import Stop, StopAt, Watch, differences, make_runner, whole_state
from .disks import fill_up, mounted, with_other_memory

BACKGROUND = pytest.mark.parametrize("background", [False, True], ids=["synchronous", "asynchronous"])
EPOCHS = dict(max_epochs=3)
"""Of seven updates each."""


def tiers(fast: Path, interval: int = 2, ordinary: int = 7, **options: Any) -> dict[str, Any]:
    return dict(
        checkpoint=dict(interval=ordinary, by_epoch=False, fast_dir=str(fast), fast_interval=interval, **options)
    )


def held(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if is_checkpoint(path)) if folder.exists() else []


def log_of(runner: FlexibleRunner) -> str:
    return (Path(runner.log_dir) / f"{runner.timestamp}.log").read_text()


def stopped(folder: Path, at: int, fast: Path, *hooks: Any, **changes: Any) -> FlexibleRunner:
    """A run that fails after so many updates."""
    changes = {"default_hooks": tiers(fast), "log_level": "INFO", **changes}
    runner = make_runner(folder, train_cfg=EPOCHS, custom_hooks=[*hooks, StopAt(at)], **changes)
    with pytest.raises(Stop):
        runner.train()
    return runner


def resumed(folder: Path, fast: Path, **changes: Any) -> FlexibleRunner:
    changes = {"default_hooks": tiers(fast), "log_level": "INFO", "resume": True, **changes}
    runner = make_runner(folder, train_cfg=EPOCHS, **changes)
    runner.train()
    return runner


@pytest.fixture
def fast(tmp_path: Path) -> Path:
    return tmp_path / "fast"


@BACKGROUND
def test_the_newest_of_both_is_resumed(tmp_path: Path, fast: Path, background: bool) -> None:
    """From the fast tier after 13 updates: the weights are those of an uninterrupted run, and the tier is gone."""
    whole = make_runner(tmp_path / "whole", train_cfg=EPOCHS)
    whole.train()
    hooks = tiers(fast, async_save=background)

    class Settles(Watch):
        def before_train_iter(self, runner: Any, *args: Any, **kwargs: Any) -> None:
            runner.finish_saving()  # or some may be left out

    failed = stopped(tmp_path / "run", 13, fast, Settles(), default_hooks=hooks)
    assert f"; resume=True continues from {fast}/iter_12\n" in log_of(failed)
    assert held(fast) == ["iter_12"]
    assert held(tmp_path / "run") == ["iter_7"]
    again = resumed(tmp_path / "run", fast, default_hooks=hooks)
    why = f"Of both tiers {fast}/iter_12 is resumed, with iteration 12: {tmp_path}/run/iter_7 has 7"
    assert why in log_of(again)
    assert again.train_loop.start_iter == 12
    assert not differences(whole_state(again), whole_state(whole))
    assert not fast.exists()


def test_the_ordinary_one_is_resumed_if_it_is_newer(tmp_path: Path, fast: Path) -> None:
    """By its iteration, whatever the clock says."""
    stopped(tmp_path / "run", 15, fast)
    shutil.copytree(tmp_path / "run" / "iter_14", tmp_path / "kept")
    assert held(fast) == ["iter_12"]  # the 14th was saved in the ordinary tier
    manifest = fast / "iter_12" / "manifest.json"
    os.utime(manifest, (manifest.stat().st_mtime + 1e6,) * 2)
    again = resumed(tmp_path / "run", fast)
    why = f"Of both tiers {tmp_path}/run/iter_14 is resumed, with iteration 14: {fast}/iter_12 has 12"
    assert why in log_of(again)
    assert again.train_loop.start_iter == 14


def test_its_path_can_be_given(tmp_path: Path, fast: Path) -> None:
    """It belongs to the run, whose ordinary checkpoints are not in its way."""
    stopped(tmp_path / "run", 13, fast)
    assert resumed(tmp_path / "run", fast, resume=str(fast / "iter_12")).train_loop.start_iter == 12
    assert held(tmp_path / "run") == ["iter_14", "iter_21", "iter_7"]


@pytest.mark.parametrize("damage", ["manifest.json", "values.json"])
def test_a_damaged_one_is_passed_over(tmp_path: Path, fast: Path, damage: str) -> None:
    stopped(tmp_path / "run", 13, fast)
    (fast / "iter_12" / damage).write_text("{}")
    again = resumed(tmp_path / "run", fast)
    assert again.train_loop.start_iter == 7
    assert f"the fast tier {fast} holds no checkpoint that can be resumed" in log_of(again)


def test_one_whose_weights_are_damaged_is_passed_over_unless_it_is_named(tmp_path: Path, fast: Path) -> None:
    """What the first attempt had restored leaves no trace."""
    whole = make_runner(tmp_path / "whole", train_cfg=EPOCHS)
    whole.train()
    stopped(tmp_path / "run", 13, fast)
    file = fast / "iter_12" / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointError, match="is damaged"):
        resumed(tmp_path / "run", fast, resume=str(fast / "iter_12"))
    again = resumed(tmp_path / "run", fast)
    assert again.train_loop.start_iter == 7
    assert f"; {tmp_path}/run/iter_7 is resumed in its place\n" in log_of(again)
    assert not differences(whole_state(again), whole_state(whole))


def test_the_one_before_stays_until_the_next_is_complete(
    tmp_path: Path, fast: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []
    seal = save_module.directory.seal

    def look(folder: Path, manifest: bytes) -> None:
        if folder.parent == fast:
            seen.append(held(fast))
        seal(folder, manifest)

    monkeypatch.setattr(save_module.directory, "seal", look)
    stopped(tmp_path / "run", 7, fast)
    assert seen == [[], ["iter_2"], ["iter_4"]]
    assert held(fast) == ["iter_6"]


def test_one_with_nan_does_not_take_the_place_of_a_good_one(tmp_path: Path, fast: Path) -> None:
    class Poisons(Watch):
        def before_train_iter(self, runner: Any, *args: Any, **kwargs: Any) -> None:
            if runner.iter == 3:
                with torch.no_grad():
                    next(runner.strategy.module.parameters()).fill_(float("nan"))

    stopped(tmp_path / "run", 5, fast, Poisons())
    assert held(fast) == ["iter_2"]


def test_a_full_memory_leaves_the_ordinary_tier(tmp_path: Path) -> None:
    with mounted(tmp_path / "shm") as shm:
        fill = Once(2, lambda runner: fill_up(shm, 0))
        fast = shm / "run"
        hooks = tiers(fast, on_error="continue")
        runner = make_runner(
            tmp_path / "run", train_cfg=EPOCHS, default_hooks=hooks, custom_hooks=[fill], log_level="INFO"
        )
        runner.train()  # and the last one of the fast tier is missed by nobody
        assert held(tmp_path / "run") == ["iter_14", "iter_21", "iter_7"]
        failures = [line for line in log_of(runner).splitlines() if "WARNING" in line]
        assert f"Fast tier: {fast}/iter_4: could not be saved on rank 0: [Errno 28] No space left" in failures[0]
        (shm / "filler").unlink()
        fill = Once(2, lambda runner: fill_up(shm, 0))
        with pytest.raises(StorageError, match=rf"^Fast tier: {fast}/iter_4: could not be saved on rank 0: "):
            make_runner(tmp_path / "b", train_cfg=EPOCHS, default_hooks=tiers(fast), custom_hooks=[fill]).train()
        assert held(fast) == ["iter_2"]


class Once(Watch):
    """Does something before one update."""

    def __init__(self, done: int, action: Callable[[Any], object]) -> None:
        super().__init__()
        self.done, self.action = done, action

    def before_train_iter(self, runner: Any, *args: Any, **kwargs: Any) -> None:
        if runner.iter == self.done:
            self.action(runner)


def test_saving_does_not_wait_for_a_slow_disk(tmp_path: Path, fast: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While an ordinary checkpoint is being written, those of the fast tier are left out."""
    write, goes_on = save_module.write_shard, threading.Event()

    def slow(path: Path, *args: Any) -> Any:
        if path.parent.name == ".iter_7.tmp":
            assert goes_on.wait(60)
        return write(path, *args)

    monkeypatch.setattr(save_module, "write_shard", slow)
    states: dict[int, list[str]] = {}

    class Looks(Watch):
        def before_train_iter(self, runner: Any, *args: Any, **kwargs: Any) -> None:
            if runner.iter == 11:
                goes_on.set()
            if runner.iter < 7 or runner.iter >= 11:
                runner.finish_saving()
            states[runner.iter] = held(fast)

    stopped(tmp_path / "run", 13, fast, Looks(), default_hooks=tiers(fast, async_save=True))
    assert states[7] == states[11] == ["iter_6"]
    assert held(fast) == ["iter_12"]


def test_it_stays_if_the_last_ordinary_one_is_missing(tmp_path: Path, fast: Path) -> None:
    with mounted(tmp_path / "disk") as disk:
        hooks = tiers(fast, out_dir=disk, on_error="continue")
        fill = Once(20, lambda runner: fill_up(disk, 0))
        runner = make_runner(tmp_path / "run", train_cfg=EPOCHS, default_hooks=hooks, custom_hooks=[fill])
        with pytest.raises(StorageError, match="^The last checkpoint is missing"):
            runner.train()
        assert held(fast) == ["iter_20"]


def test_a_run_that_is_preempted_saves_an_ordinary_one(tmp_path: Path, fast: Path) -> None:
    """It may come back on another machine, so one in the fast tier of the same update is not enough."""
    saved: list[Path] = []

    class Preempted(Watch):
        priority = "LOWEST"

        def after_train_iter(self, runner: Any, *args: Any, **kwargs: Any) -> None:
            if runner.iter + 1 == 4:
                saved.append(next(hook for hook in runner.hooks if isinstance(hook, CheckpointHook)).save_now(runner))

    stopped(tmp_path / "run", 5, fast, Preempted())
    assert held(fast) == ["iter_4"]
    assert [path.parent for path in saved] == [tmp_path / "run"]
    assert is_checkpoint(saved[0])


# Whose it is


def test_another_run_does_not_get_it(tmp_path: Path, fast: Path) -> None:
    stopped(tmp_path / "run", 5, fast)
    says = f"^CheckpointHook.fast_dir: {fast} holds checkpoints of the run in {tmp_path}/run; give every run a folder"
    for resume in (False, True):
        other = make_runner(tmp_path / "other", train_cfg=EPOCHS, default_hooks=tiers(fast), resume=resume)
        with pytest.raises(ConfigError, match=says):
            other.train()
    assert held(fast) == ["iter_4"]
    assert resumed(tmp_path / "run", fast).train_loop.start_iter == 4


def test_a_new_start_asks_before_it_replaces(tmp_path: Path, fast: Path) -> None:
    stopped(tmp_path / "run", 5, fast)
    with pytest.raises(ConfigError, match=f"fast_dir: {fast} holds iter_4 of an earlier start of this run"):
        make_runner(tmp_path / "run", train_cfg=EPOCHS, default_hooks=tiers(fast)).train()
    runner = stopped(tmp_path / "run", 1, fast, default_hooks=tiers(fast, overwrite=True))
    assert runner.iter == 0
    assert held(fast) == []


def test_what_an_earlier_start_left_on_another_machine_is_not_resumed(tmp_path: Path, fast: Path) -> None:
    """The run begins anew elsewhere, with other memory, and comes back to the first machine."""
    stopped(tmp_path / "run", 5, fast)
    stopped(tmp_path / "run", 1, tmp_path / "elsewhere")
    again = resumed(tmp_path / "run", fast)
    assert again.train_loop.start_iter == 0
    assert f"the fast tier {fast} holds checkpoints of another run" in log_of(again)


def test_a_future_that_was_given_up_is_not_resumed(tmp_path: Path, fast: Path) -> None:
    stopped(tmp_path / "run", 13, fast)
    assert held(fast) == ["iter_12"]
    stopped(tmp_path / "run", 8, fast, resume=str(tmp_path / "run" / "iter_7"))
    assert held(fast) == ["iter_8"]
    assert resumed(tmp_path / "run", fast).train_loop.start_iter == 8


def test_a_work_directory_on_another_path_keeps_it(tmp_path: Path, fast: Path) -> None:
    """A copy of it, beside the run that it was made of, does not get it."""
    stopped(tmp_path / "run", 13, fast)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    with pytest.raises(ConfigError, match=f"of the run in {tmp_path}/run; give every run a folder of its own"):
        resumed(tmp_path / "copy", fast)
    (tmp_path / "run").rename(tmp_path / "moved")
    stopped(tmp_path / "moved", 17, fast, resume=True)
    assert resumed(tmp_path / "moved", fast).train_loop.start_iter == 16


def test_two_runs_at_once(tmp_path: Path, fast: Path) -> None:
    class Begins(Watch):
        def before_train(self, runner: Any) -> None:
            other = make_runner(tmp_path / "other", train_cfg=EPOCHS, default_hooks=tiers(fast))
            with pytest.raises(ConfigError, match=f"{fast} is where another run trains at the moment"):
                other.train()

    make_runner(tmp_path / "run", train_cfg=EPOCHS, default_hooks=tiers(fast), custom_hooks=[Begins()]).train()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(fast_dir="/dev/shm/a"), "CheckpointHook.fast_interval: missing, fast_dir needs it"),
        (dict(fast_interval=3), "CheckpointHook.fast_dir: missing, fast_interval needs it"),
        (
            dict(fast_dir="/dev/shm/a", fast_interval=0),
            "CheckpointHook.fast_interval: 0 is not allowed, give 1 or more",
        ),
        (
            dict(fast_dir="s3://a/b", fast_interval=1),
            'CheckpointHook.fast_dir: "s3://a/b" is not allowed, give a local',
        ),
        (dict(fast_dir="", fast_interval=1), 'CheckpointHook.fast_dir: "" is not allowed, give a local'),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        CheckpointHook(**options)
    assert str(raised.value).startswith(message)


def test_a_folder_that_is_taken(tmp_path: Path) -> None:
    runner = make_runner(tmp_path / "run", default_hooks=tiers(tmp_path / "run"))
    with pytest.raises(ConfigError, match=f"^CheckpointHook.fast_dir: {tmp_path}/run is the work_dir too"):
        runner.train()


# Several processes


def train_two(folder: Path, fast: Path, at: int | None, background: bool) -> tuple[int, dict[str, Any]]:
    hooks = [] if at is None else [StopAt(at)]
    runner = make_runner(
        folder,
        train_cfg=EPOCHS,
        resume=True,
        strategy=dict(type="DDPStrategy"),
        default_hooks=tiers(fast, interval=1, ordinary=100, async_save=background),
        custom_hooks=hooks,
    )
    with contextlib.suppress(Stop):
        runner.train()
    start, state = runner.train_loop.start_iter, whole_state(runner)
    runner.strategy.leave()
    return start, state


@pytest.mark.distributed
@BACKGROUND
def test_two_processes_go_on_from_it(workers2: WorkerGroup, tmp_path: Path, fast: Path, background: bool) -> None:
    (_, expected), _ = workers2.run(train_two, tmp_path / "whole", tmp_path / "x", None, False)
    workers2.run(train_two, tmp_path / "run", fast, 7, background)
    (name,) = held(fast)
    assert background or name == "iter_7"
    for start, state in workers2.run(train_two, tmp_path / "run", fast, None, background):
        assert f"iter_{start}" == name
        assert not differences(state, expected)
    assert not fast.exists()


def apart(folder: Path, fast: Path) -> str:
    def train() -> str:
        runner = make_runner(
            folder, train_cfg=EPOCHS, strategy=dict(type="DDPStrategy"), default_hooks=tiers(fast), resume=True
        )
        try:
            runner.train()
        except ConfigError as error:
            return str(error)
        finally:
            runner.strategy.leave()
        return ""

    return train() if os.environ["RANK"] == "0" else with_other_memory(fast, train)


@pytest.mark.distributed
@pytest.mark.skipif(os.geteuid() != 0, reason="a file system can be mounted by root only")
def test_memory_of_several_machines_is_refused(workers2: WorkerGroup, tmp_path: Path, fast: Path) -> None:
    """Rank 1 sees another folder under the name, as on another machine."""
    first, second = workers2.run(apart, tmp_path / "run", fast)
    host = os.uname().nodename
    assert (
        first
        == second
        == (
            f"CheckpointHook.fast_dir: {fast} on {host} (rank 1) is another folder than on {host} (rank 0); give storage "
            "that all machines share, such as a parallel file system; memory is for one machine"
        )
    )
