"""Preemption: a signal, or the end of the allowed time, ends all processes at the same point, saved and exactly resumable."""

from __future__ import annotations

import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flextrain import CheckpointError, ConfigError, FlexibleRunner, Hook, Strategy
from flextrain.core.base.events import read_events
from flextrain.core.checkpoint import find_latest, is_checkpoint
from flextrain.runner import runner as runner_module
from flextrain.runner.health import preemption as preemption_module
from flextrain.runner.health.preemption import Terminated, requeue, seconds_of, slurm_end
from flextrain.runner.loops.train import EpochBasedTrainLoop
from flextrain.testing import WorkerGroup

from ..waiting import wait_until
from .training import Accuracy, Samples, differences, make_runner, validation, whole_state

pytestmark = pytest.mark.usefixtures("quick")

EVERY_50 = dict(checkpoint=dict(by_epoch=False, interval=50))
ENDLESS = dict(by_epoch=True, max_epochs=10**6)


@pytest.fixture(autouse=True)
def _usual_handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    for number in before:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class At(Hook):
    """Does something at a hook point the first time that an update is done there."""

    priority = "LOWEST"

    def __init__(self, done: int, then: Callable[[], object], point: str = "after_train_iter") -> None:
        self.done, self.then, self.evaluated = done, then, 0
        setattr(self, point, self._act)

    def _act(self, runner: Any, *args: Any, **kwargs: Any) -> None:
        if runner.train_loop.state_dict()["iter"] == self.done:
            self.done = -1
            self.then()


class Batches(Hook):
    """Counts the batches of validations."""

    def __init__(self) -> None:
        self.count = 0

    def after_val_iter(self, runner: Any, *args: Any, **kwargs: Any) -> None:
        self.count += 1


def terminate(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


def run(folder: Path, *hooks: Any, **changes: Any) -> FlexibleRunner:
    return make_runner(folder, custom_hooks=hooks, **{"default_hooks": EVERY_50, "resume": True, **changes})


def ended(runner: FlexibleRunner, status: int = 143) -> Terminated:
    with pytest.raises(SystemExit) as caught:
        runner.train()
    assert isinstance(caught.value, Terminated)
    assert caught.value.code == status
    return caught.value


# One process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=["SIGTERM", "SIGUSR1"])
@pytest.mark.parametrize("by_epoch", [True, False])
def test_the_update_is_finished_and_saved_and_a_resumed_run_ends_as_if_nothing_had_come(
    tmp_path: Path, number: int, by_epoch: bool
) -> None:
    hooks = dict(checkpoint=dict(by_epoch=by_epoch, interval=50, save_optimizer=False))
    whole = run(tmp_path / "whole", default_hooks=hooks)
    whole.train()
    first = run(
        tmp_path / "run", At(10, lambda: terminate(number), "before_train_iter"), default_hooks=hooks
    )  # in the second epoch
    end = ended(first)
    assert (first.iter, end.saved) == (11, "saved as iter_11")
    event = read_events(tmp_path / "run")[-1]
    assert event["event"] == "preempted"
    assert (event["iter"], event["status"], event["by"]) == (11, 143, signal.Signals(number).name)
    second = run(tmp_path / "run", default_hooks=hooks)
    second.train()
    assert second.train_loop.start_iter == 11
    assert not differences(whole_state(second), whole_state(whole))


@pytest.mark.parametrize(
    ("max_keep_ckpts", "left"), [(1, ["epoch_3"]), (-1, ["epoch_2", "epoch_3", "iter_10", "iter_8"])]
)
def test_checkpoints_in_the_middle_of_an_epoch_are_replaced_by_the_next_one(
    tmp_path: Path, max_keep_ckpts: int, left: list[str]
) -> None:
    """Two signals in the second of three epochs of 7 updates."""
    hooks = dict(checkpoint=dict(interval=1, save_begin=2, max_keep_ckpts=max_keep_ckpts))
    for done in (8, 10):
        assert ended(run(tmp_path, At(done, terminate), default_hooks=hooks)).saved == f"saved as iter_{done}"
        assert is_checkpoint(tmp_path / f"iter_{done}")
    assert is_checkpoint(tmp_path / "iter_8") == (max_keep_ckpts == -1)
    run(tmp_path, default_hooks=hooks).train()
    assert sorted(path.name for path in tmp_path.glob("*_[0-9]*") if is_checkpoint(path)) == left


def test_what_has_just_been_saved_is_not_saved_again(tmp_path: Path) -> None:
    saves: list[str] = []
    hooks = dict(checkpoint=dict(by_epoch=False, interval=5, async_save=True))
    runner = run(tmp_path, At(5, terminate), default_hooks=hooks)
    save = runner.save_checkpoint
    runner.save_checkpoint = lambda *args, **kw: (saves.append(args[1]), save(*args, **kw))[1]  # type: ignore[method-assign]
    assert ended(runner).saved == "saved as iter_5"
    assert saves == ["iter_5"]
    assert is_checkpoint(tmp_path / "iter_5")


def test_a_validation_is_left_at_once_and_repeated(tmp_path: Path) -> None:
    """It counts as not begun: random numbers that it draws are drawn again, and weights are not the averages."""

    def options(name: str, *hooks: Hook) -> dict[str, Any]:
        average = dict(type="EMAHook", momentum=0.1)
        parts = {**validation(), "val_evaluator": dict(type=Drawing)}
        return dict(
            folder=tmp_path / name, custom_hooks=[average, *hooks], default_hooks=EVERY_50, resume=True, **parts
        )

    whole = make_runner(**options("whole"))
    whole.train()
    counts = Batches()
    first = make_runner(**options("run", counts, At(14, terminate, "before_val_iter")))
    end = ended(first)
    assert (first.iter, first.epoch, end.saved, counts.count) == (14, 2, "saved as iter_14", 3 + 1)
    again = Batches()
    second = make_runner(**options("run", again))
    second.train()
    assert again.count == 2 * 3
    assert not differences(whole_state(second), whole_state(whole))


class Drawing(Accuracy):
    def process(self, data_batch: Any, data_samples: Any) -> None:
        torch.rand(3)
        super().process(data_batch, data_samples)


def test_before_the_first_update_there_is_nothing_to_save(tmp_path: Path) -> None:
    runner = run(tmp_path, At(0, terminate, "before_train_iter"))
    with pytest.raises(Terminated) as caught:
        runner.train()
    assert (caught.value.saved, runner.iter) == ("", 0)
    assert find_latest(tmp_path) is None


def test_val_alone_ends_at_once(tmp_path: Path) -> None:
    counts = Batches()
    runner = run(tmp_path, counts, At(0, terminate, "before_val_iter"), **validation())
    with pytest.raises(Terminated):
        runner.val()
    assert counts.count == 0


def test_without_a_checkpoint_hook_or_save_nothing_is_saved(tmp_path: Path) -> None:
    none = run(tmp_path / "none", At(3, terminate), default_hooks=dict(checkpoint=None))
    assert ended(none).saved == "not saved, there is no CheckpointHook"
    off = run(tmp_path / "off", At(3, terminate), env_cfg=dict(preemption=dict(save=False, status=75)))
    assert ended(off, 75).saved == "not saved (env_cfg.preemption.save=False)"
    assert find_latest(tmp_path / "off") is None


def test_a_full_disk_does_not_hide_what_came(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = run(tmp_path, At(3, terminate))

    def fails(*args: Any, **kwargs: Any) -> str:
        raise CheckpointError("iter_3: no space left on the device")

    monkeypatch.setattr(runner, "save_checkpoint", fails)
    assert ended(runner).saved == "not saved: iter_3: no space left on the device"


def test_the_allowed_time_ends_training_and_another_thread_can_ask(tmp_path: Path) -> None:
    runner = run(tmp_path / "time", train_cfg=ENDLESS, env_cfg=dict(preemption=dict(max_time=0.3)))
    end = ended(runner)
    assert end.what == "Ended by max_time"
    assert end.saved == f"saved as iter_{runner.iter}"
    asked = run(tmp_path / "asked", train_cfg=ENDLESS)
    threading.Timer(0.3, lambda: asked.request_stop("the room is too warm")).start()
    assert ended(asked).what == "Ended by request_stop(): the room is too warm"
    assert find_latest(tmp_path / "asked") == tmp_path / "asked" / f"iter_{asked.iter}"


def test_a_program_that_catches_the_end_may_go_on(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole")
    whole.train()
    runner = run(tmp_path / "run", At(10, terminate), At(15, terminate))
    for done in (10, 15):
        ended(runner)
        assert runner.iter == done
    runner.train()
    assert not differences(whole_state(runner), whole_state(whole))


@pytest.mark.parametrize("preemption", [False, None])
def test_signals_are_left_alone_if_that_is_wanted(tmp_path: Path, preemption: Any) -> None:
    runner = make_runner(tmp_path, env_cfg=dict(preemption=preemption))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    runner.request_stop()
    with pytest.raises(Terminated):
        runner.train()


def test_a_handler_that_c_code_has_set_stays(tmp_path: Path) -> None:
    import faulthandler

    with (tmp_path / "stacks").open("w") as file:
        faulthandler.register(signal.SIGUSR1, file)
        try:
            make_runner(tmp_path / "run", log_level="INFO")
            terminate(signal.SIGUSR1)
        finally:
            faulthandler.unregister(signal.SIGUSR1)
    assert "Current thread" in (tmp_path / "stacks").read_text()
    (log,) = (tmp_path / "run").glob("*/*.log")
    assert "preemption.signals: USR1 left alone, the program or a library has a handler of its own" in log.read_text()


def test_outside_of_the_main_thread_there_is_no_handler(tmp_path: Path) -> None:
    thread = threading.Thread(target=make_runner, args=[tmp_path], kwargs=dict(log_level="INFO"))
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    (log,) = tmp_path.glob("*/*.log")
    assert "preemption.signals: TERM, USR1 left alone, the runner was not made in the main thread" in log.read_text()


class OwnIteration(EpochBasedTrainLoop):
    """A loop of the user's, which counts after the update."""

    counted = 0

    def run_iter(self, idx: Any, data_batch: Any = None) -> None:
        super().run_iter(idx, data_batch)
        self.counted += 1


def test_a_loop_with_methods_of_its_own_ends_after_them(tmp_path: Path) -> None:
    runner = run(tmp_path, At(5, terminate), train_cfg=dict(type=OwnIteration, max_epochs=3))
    ended(runner)
    assert runner.iter == runner.train_loop.counted == 5  # type: ignore[attr-defined]


# Several processes


class Sleeping(Samples):
    """Samples that take so long that the processes can tell each other something within an epoch."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        time.sleep(0.005)
        return super().__getitem__(index)


def end_by_rank(folder: Path, rank: int, point: str, strategy: str, done: int) -> list[Any]:
    """A signal to one process; then the rest of the run, which has to end as one without a signal."""
    own = dist_rank()
    loader = dict(batch_size=4, dataset=Sleeping(126), collate_fn="default_collate")
    parts = {**validation(40), "val_evaluator": dict(type=Drawing)}
    parts["val_dataloader"] = {**parts["val_dataloader"], "dataset": Sleeping(61)}
    options: dict[str, Any] = dict(
        train_dataloader=loader, strategy=dict(type=strategy), train_cfg=dict(by_epoch=True, max_epochs=2), **parts
    )
    whole = run(folder / "whole", **options)
    whole.train()
    first = run(folder / "run", *([At(done, terminate, point)] if own == rank else []), **options)
    end = ended(first)
    latest = find_latest(folder / "run")
    assert latest is not None
    second = run(folder / "run", **options)
    second.train()
    assert not differences(whole_state(second), whole_state(whole))
    facts = [first.iter, end.saved, end.what.partition(" on ")[0], second.train_loop.start_iter, latest.name]
    for runner in (whole, first, second):
        runner.strategy.leave()
    return facts


def dist_rank() -> int:
    return int(os.environ["RANK"])


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("rank", "point", "strategy", "done"),
    [
        (1, "before_train_iter", "DDPStrategy", 3),
        pytest.param(1, "before_val_iter", "DDPStrategy", 16, marks=pytest.mark.full),
        pytest.param(0, "after_train_iter", "DDPStrategy", 3, marks=pytest.mark.full),
        pytest.param(1, "before_train_iter", "FSDPStrategy", 3, marks=pytest.mark.full),
        pytest.param(0, "before_val_iter", "FSDPStrategy", 16, marks=pytest.mark.full),
        pytest.param(1, "before_train_iter", "DeepSpeedStrategy", 3, marks=[pytest.mark.full, pytest.mark.deepspeed]),
    ],
)
def test_a_signal_to_one_process_ends_all_at_the_same_point(
    tmp_path: Path, workers2: WorkerGroup, rank: int, point: str, strategy: str, done: int
) -> None:
    results = workers2.run(end_by_rank, tmp_path, rank, point, strategy, done)
    assert results[0] == results[1]
    iteration, saved, what, resumed, latest = results[0]
    assert iteration == resumed >= done
    assert saved == f"saved as {latest}" == f"saved as iter_{iteration}"
    assert what == f"Ended by SIGTERM, which came to rank {rank}"
    (event,) = (event for event in read_events(tmp_path / "run") if event["event"] == "preempted")
    assert (event["iter"], event["on_rank"]) == (iteration, rank)


class OwnPace(Strategy):
    """No process waits for another one in an update, which nobody should write."""


class Ahead(Hook):
    """Makes twenty updates after this process knows that it has to end, and says so in a file."""

    def __init__(self, file: Path) -> None:
        self.file, self.count = file, 0

    def after_train_iter(self, runner: Any, *args: Any, **kwargs: Any) -> None:
        self.count += runner.stop_check is not None
        if self.count == 20:
            self.file.touch()


def end_at_different_updates(folder: Path) -> tuple[int, str]:
    ahead = folder / "ahead"
    hooks: list[Hook] = [Ahead(ahead)]
    if dist_rank() == 0:
        hooks = [At(3, lambda: runner.request_stop("enough")), At(4, lambda: wait_until(ahead.exists))]
    loader = dict(batch_size=4, dataset=Samples(100_000), collate_fn="default_collate")
    rare = dict(checkpoint=dict(by_epoch=False, interval=10**6), logger=dict(interval=10**6))
    runner = run(folder, *hooks, strategy=dict(type=OwnPace), train_dataloader=loader, default_hooks=rare)
    end = ended(runner)
    assert end.what.startswith("Ended by request_stop() on rank 0 on ")
    assert end.what.endswith(": enough")
    runner.strategy.leave()
    return runner.iter, end.saved


@pytest.mark.distributed
def test_processes_at_different_updates_do_not_save(tmp_path: Path, workers2: WorkerGroup) -> None:
    (first, said), (second, other) = workers2.run(end_at_different_updates, tmp_path)
    assert second > first
    begin = "not saved, the processes are at different updates: "
    assert said == f"{begin}rank 1 is in the end at iteration {second}"
    assert other == f"{begin}rank 0 is in the end at iteration {first}"
    assert find_latest(tmp_path) is None
    (event,) = (event for event in read_events(tmp_path) if event["event"] == "preempted")
    assert (event["iter"], event["end"], event["by"]) == (first, said, "enough")


def end_in_the_last_update(folder: Path) -> str:
    asks = At(8, lambda: runner.request_stop("enough"))
    runner = run(folder, *([asks] if dist_rank() == 1 else []), train_cfg=dict(by_epoch=False, max_iters=8))
    end = ended(runner)
    runner.train()  # a program that goes on has nothing left to do
    runner.strategy.leave()
    return end.saved


@pytest.mark.distributed
def test_a_request_in_the_last_update_is_heard_by_all(tmp_path: Path, workers2: WorkerGroup) -> None:
    """It comes too late for the threads that look for it."""
    assert workers2.run(end_in_the_last_update, tmp_path) == ["training was complete"] * 2


def end_after_the_last_update(folder: Path) -> str:
    """Rank 1 is asked when it has done the last update, and rank 0 has not: only the main thread may tell the others."""
    real = preemption_module.CommonEnd.last_word

    def asked_before(end: Any, asked: str | None, number: int) -> Any:
        runner.request_stop("enough")
        time.sleep(0.5)  # the thread looks several times a second
        return real(end, asked, number)

    hooks = [At(8, lambda: time.sleep(1.0))] if dist_rank() == 0 else []
    runner = run(folder, *hooks, train_cfg=dict(by_epoch=False, max_iters=8))
    with pytest.MonkeyPatch.context() as monkeypatch:
        if dist_rank() == 1:
            monkeypatch.setattr(preemption_module.CommonEnd, "last_word", asked_before)
        end = ended(runner)
    runner.strategy.leave()
    return end.saved


@pytest.mark.distributed
def test_a_request_after_the_last_update_of_one_lets_the_others_finish_theirs(
    tmp_path: Path, workers2: WorkerGroup
) -> None:
    assert workers2.run(end_after_the_last_update, tmp_path) == ["training was complete"] * 2
    assert find_latest(tmp_path) == tmp_path / "iter_8"


def end_apart(folder: Path, way: str) -> str:
    """A signal to a process that cannot ask the others any more; what ends it must not be waited for by them."""
    runner = run(folder, env_cfg=dict(preemption=dict(max_time="slurm")))
    preemption, monitor = runner.oversight.preemption, runner.oversight.monitor
    assert monitor is not None
    if way == "left":
        runner.strategy.leave()
        monitor.join(30)
    else:
        assert preemption.bulletin is not None
        preemption.bulletin._store = lost_store()
        wait_until(lambda: preemption._size == 1)
    with pytest.raises(Terminated) as caught:
        terminate_and_wait()
    if way == "lost":
        runner.strategy.leave()
    return caught.value.what


def terminate_and_wait() -> None:
    terminate()
    time.sleep(30)


def lost_store() -> Any:
    server = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = torch.distributed.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    return torch.distributed.PrefixStore("lost", client)


@pytest.mark.distributed
@pytest.mark.parametrize("way", ["left", pytest.param("lost", marks=pytest.mark.full)])
def test_a_signal_is_heard_where_nobody_can_be_asked(
    tmp_path: Path, workers2: WorkerGroup, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Because the process has left the group, or the one with the store has ended. Slurm is asked by rank 0 alone."""
    program(tmp_path, "squeue", f"echo asked >> {tmp_path}/asked; echo 2099-01-01T00:00:00")
    slurm = dict(SLURM_JOB_ID="7", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert workers2.run(with_environment, slurm, end_apart, tmp_path / "run", way) == ["Ended by SIGTERM"] * 2
    assert (tmp_path / "asked").read_text() == "asked\n"


def with_environment(names: dict[str, str], function: Callable[..., Any], *args: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in names.items():
            patch.setenv(name, value)
        patch.delenv("SLURM_JOB_END_TIME", raising=False)
        return function(*args)


class Stuck(Hook):
    """Gets a signal when it is made, before the process group, and does not come on."""

    def __init__(self, rank: int) -> None:
        if dist_rank() == rank:
            terminate()
            time.sleep(3600)


def end_of_the_constructor(folder: Path, rank: int) -> tuple[Any, str]:
    preemption_module.FORMING_S = 0.2
    try:
        with pytest.raises(Terminated) as caught:
            run(folder, dict(type=Stuck, rank=rank), strategy=dict(type="DDPStrategy", timeout_s=3600))  # type: ignore[arg-type]
    finally:
        preemption_module.FORMING_S = 5.0
    return caught.value.code, caught.value.what.partition(" on ")[0]


@pytest.mark.distributed
@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.full)])
def test_a_process_that_is_ended_before_the_group_forms_ends_the_others_too(
    tmp_path: Path, workers2: WorkerGroup, rank: int
) -> None:
    found = workers2.run(end_of_the_constructor, tmp_path, rank)
    assert found[rank] == (143, "Ended by SIGTERM")
    assert found[1 - rank] == (143, f"Ended by SIGTERM, which came to rank {rank}")


def end_after_the_group_has_formed(folder: Path) -> tuple[Any, list[str]]:
    """A signal right after the processes have met, when the runner is not complete."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    check = runner_module.check_agreement

    def wait(*args: Any) -> None:
        if dist_rank() == 1:
            terminate()
        time.sleep(3600)

    runner_module.check_agreement = wait
    logger = logging.getLogger("flextrain")
    logger.addHandler(handler)
    logger.setLevel("INFO")  # as it is before the first run
    try:
        with pytest.raises(Terminated) as caught:
            run(folder, strategy="DDPStrategy")
    finally:
        logger.removeHandler(handler)
        runner_module.check_agreement = check
    return caught.value.code, lines


@pytest.mark.distributed
def test_a_signal_in_the_constructor(tmp_path: Path, workers2: WorkerGroup) -> None:
    (first, lines), (second, _) = workers2.run(end_after_the_group_has_formed, tmp_path / "run")
    assert (first, second) == (143, 143)
    (line,) = lines
    assert line.startswith("Ended by SIGTERM, which came to rank 1 on ")
    assert line.endswith(" outside of train(), where there is nothing to save")


# Configuration


def test_mistakes_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    for preemption, said in [
        (dict(signals=("TRM",)), 'env_cfg.preemption.signals: "TRM" is not allowed, .* did you mean "TERM"?'),
        (dict(signals=["INT"]), "signals: .*Ctrl-C always ends a run at once"),
        (dict(max_time="1h"), 'max_time: "1h" is not allowed, give seconds, "HH:MM:SS"'),
        (dict(max_time="slurm"), "max_time: needs a job of Slurm"),
        (dict(requeue=True), "requeue: needs a job of Slurm"),
        (dict(sav=True), 'env_cfg.preemption.sav: unknown key, did you mean "save"?'),
    ]:
        with pytest.raises(ConfigError, match=said):
            make_runner(tmp_path, env_cfg=dict(preemption=preemption))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("00:00:30", 30), ("23:50:00", 85800), ("2-01:00:00", 176400), ("100:00:00", 360000), (12.5, 12.5)],
)
def test_durations(text: str | float, seconds: float) -> None:
    assert seconds_of(text, "max_time") == seconds


def program(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_slurm_is_asked_for_the_end_and_requeues_only_what_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1893456000")
    assert slurm_end("max_time") == 1893456000
    monkeypatch.delenv("SLURM_JOB_END_TIME")
    program(tmp_path, "squeue", "echo 2030-01-01T00:00:00 365-00:00:00")
    assert slurm_end("max_time") == time.mktime((2030, 1, 1, 0, 0, 0, 0, 0, -1))
    program(tmp_path, "squeue", 'echo "NONE                UNLIMITED           "')
    assert slurm_end("max_time") == math.inf
    later = tmp_path / "later"  # a job that has just begun
    program(tmp_path, "squeue", f"if [ -e {later} ]; then echo 2030-01-01T00:00:00; else echo NONE; touch {later}; fi")
    assert slurm_end("max_time") == time.mktime((2030, 1, 1, 0, 0, 0, 0, 0, -1))
    monkeypatch.setattr(time, "sleep", lambda _: None)
    program(tmp_path, "squeue", "echo Unknown")
    with pytest.raises(ConfigError, match='says of job 7 that it ends at "Unknown"'):
        slurm_end("max_time")
    program(tmp_path, "scontrol", f'echo "$@" >> {tmp_path}/asked')
    program(tmp_path, "squeue", "echo COMPLETING")
    assert requeue() == "job 7 is not requeued, Slurm is ending it already (COMPLETING)"
    assert not (tmp_path / "asked").exists()
    program(tmp_path, "squeue", "echo RUNNING")
    assert requeue() == "job 7 is requeued"
    assert (tmp_path / "asked").read_text() == "requeue 7\n"
    program(tmp_path, "scontrol", "echo Requested operation is presently disabled >&2; exit 1")
    assert requeue() == "requeue: scontrol failed, Requested operation is presently disabled"


def test_a_job_is_handed_in_again_if_it_has_made_an_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    program(tmp_path, "squeue", "echo RUNNING")
    program(tmp_path, "scontrol", f'echo "$@" >> {tmp_path}/asked')

    def asked() -> int:
        file = tmp_path / "asked"
        return len(file.read_text().splitlines()) if file.exists() else 0

    again = dict(env_cfg=dict(preemption=dict(requeue=True)))
    early = run(tmp_path / "early", At(0, terminate, "before_train"), **again)
    assert ended(early).saved == ""
    assert asked() == 0
    saved = ended(run(tmp_path / "saved", At(3, terminate), **again)).saved
    assert (saved, asked()) == ("saved as iter_3; job 7 is requeued", 1)
    whole = run(tmp_path / "complete", At(21, terminate, "after_train"), **again)
    assert whole.max_iters == 21
    assert (ended(whole).saved, asked()) == ("training was complete; job 7 is requeued", 2)
    evaluates = run(tmp_path / "after", **again)
    evaluates.train()
    with pytest.raises(Terminated) as caught:
        terminate()
    assert (caught.value.saved, asked()) == ("job 7 is requeued", 3)


# The process group


SCRIPT = """
import signal, sys, torch
from flextrain import FlexibleRunner, Hook

# What a shell starts in the background ignores the signal, and so would this.
signal.signal(signal.SIGINT, signal.default_int_handler)

class Ready(Hook):
    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if runner.iter == 20:
            print("ready", flush=True)

class Net(torch.nn.Linear):
    def forward(self, x):
        return {"loss": super().forward(x).square().mean()}

if __name__ == "__main__":
    folder, *contexts = sys.argv[1:]
    workers = [dict(num_workers=1, persistent_workers=True, multiprocessing_context=context) for context in contexts]
    data = torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=4, **(workers[0] if workers else {}))
    FlexibleRunner(
        model=Net(4, 1), work_dir=folder, train_dataloader=data, log_level="INFO", custom_hooks=[Ready()],
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.01)), train_cfg=dict(by_epoch=False, max_iters=10**7),
        default_hooks=dict(checkpoint=dict(by_epoch=False, interval=10)),
    ).train()
"""


def ended_by(number: int, folder: Path, *contexts: str) -> tuple[int, str]:
    """A run of its own, with a worker of such a context, is sent a signal: its status, and what it prints then."""
    (folder / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(folder / "script.py"), str(folder / "work"), *contexts]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    assert process.stdout is not None
    try:
        assert any(line == "ready\n" for line in process.stdout)
        os.killpg(process.pid, number)
        rest, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode, rest


AGAIN = """
import atexit, os, signal, sys
from flextrain.runner import signals
from flextrain.runner.health.termination import Terminated

class Run:
    is_needed = True
    def came(self, number):
        raise Terminated()

def signalled(leave=True):
    run = Run()
    signals.listen(run, ["TERM"])
    os.kill(os.getpid(), signal.SIGTERM)

for program in sys.argv[1:]:
    if (child := os.fork()) == 0:
        exec(program)
        sys.exit("the second signal had no effect")
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.mark.processes
def test_a_second_signal_does_not_disturb_the_end() -> None:
    """As torchrun sends it when the first process has left; a program that has caught the end is ended as ever."""
    statuses = {
        "atexit.register(os.kill, os.getpid(), signal.SIGTERM)\nsignalled()": "143",
        "try: signalled()\nfinally: os.kill(os.getpid(), signal.SIGTERM)": "143",
        "try: signalled()\nexcept Terminated: pass\nos.kill(os.getpid(), signal.SIGTERM)": "-15",
    }
    done = subprocess.run([sys.executable, "-c", AGAIN, *statuses], stdout=subprocess.PIPE, text=True)
    assert done.stdout.split() == [*statuses.values()]


@pytest.mark.processes
@pytest.mark.full
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_outlive_a_signal_to_the_process_group(tmp_path: Path, context: str) -> None:
    status, rest = ended_by(signal.SIGTERM, tmp_path, context)
    assert status == 143
    assert " - WARNING - Ended by SIGTERM after epoch " in rest
    assert "; saved as iter_" in rest
