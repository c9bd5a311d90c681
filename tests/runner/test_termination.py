"""How a run ends before its time: what the log says of it, and what SIGTERM does."""

from __future__ import annotations

import contextlib
import gc
import io
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flextrain import CheckpointError, FlexibleRunner, Hook
from flextrain.core.checkpoint import is_checkpoint
from flextrain.core.checkpoint import save as saving
from flextrain.testing import WorkerGroup

from .test_preemption import ended_by
from .training import make_runner

pytestmark = pytest.mark.usefixtures("quick")

SAVING = dict(checkpoint=dict(by_epoch=False, interval=2))


class At(Hook):
    """Does something after an update, and in ``on_exception``."""

    priority = "LOWEST"

    def __init__(self, at: int, then: Callable[[], object], at_the_end: Callable[[], object] = lambda: None) -> None:
        self.at, self.then, self.at_the_end = at, then, at_the_end

    def after_train_iter(self, runner: Any, *args: Any, **kwargs: Any) -> None:
        if runner.iter + 1 == self.at:
            self.then()

    def on_exception(self, runner: Any, exception: BaseException) -> None:
        self.at_the_end()


def run(folder: Path, *hooks: Hook, **changes: Any) -> FlexibleRunner:
    options = {"log_level": "INFO", "default_hooks": SAVING, **changes}
    return make_runner(folder, custom_hooks=hooks, **options)


def log_file(folder: Path) -> str:
    (file,) = (file for file in folder.glob("*/*.log") if file.stem == file.parent.name)
    return file.read_text()


def file_of_rank(folder: Path, rank: int) -> str:
    (file,) = folder.glob(f"*/*_rank{rank}.log")
    return file.read_text()


def fail(error: Exception) -> None:
    raise error


def interrupt() -> None:
    raise KeyboardInterrupt


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture(autouse=True)
def _usual_handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


# Failures


def test_a_failure_is_in_the_file_with_its_traceback_and_what_to_resume_from(tmp_path: Path, capsys: Any) -> None:
    runner = run(tmp_path, At(5, lambda: fail(RuntimeError("a lamp fell\nonto the disk"))))
    with pytest.raises(RuntimeError, match="a lamp fell"):
        runner.train()
    begins = " - flextrain - ERROR - Failed after epoch 0, iteration 4 in custom_hooks (At.after_train_iter), "
    said = ": RuntimeError: a lamp fell; resume=True continues from iter_4\n"
    head, _, rest = log_file(tmp_path).partition(begins)
    assert head
    place, _, rest = rest.partition(said)
    assert re.fullmatch(r".*test_termination\.py:\d+", place)
    assert rest.startswith("Traceback (most recent call last):\n")
    _, _, table = rest.partition("RuntimeError: a lamp fell\nonto the disk\n")
    assert " - INFO - The run:\n  ended        RuntimeError: a lamp fell onto the disk\n" in table
    printed = capsys.readouterr().out
    assert said in printed
    assert "Traceback" not in printed, "the interpreter prints it"


def test_what_cannot_be_resumed_is_not_recommended(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("epoch_9")
    with pytest.raises(CheckpointError, match="epoch_9"):
        run(tmp_path, resume=True).train()
    assert " - ERROR - Failed: CheckpointError: " in log_file(tmp_path)
    assert "continues from" not in log_file(tmp_path)


def test_a_broken_latest_does_not_hide_the_failure(tmp_path: Path) -> None:
    def spoil() -> None:
        (tmp_path / "latest").write_text("epoch_7")
        fail(RuntimeError("a lamp fell"))

    with pytest.raises(RuntimeError, match="a lamp fell"):
        run(tmp_path, At(5, spoil)).train()
    said = "RuntimeError: a lamp fell; resume=True continues from iter_4\n"
    assert said in log_file(tmp_path)


def test_a_function_set_as_on_exception_that_fails_does_not_hide_the_failure(tmp_path: Path) -> None:
    hook: Any = At(5, lambda: fail(RuntimeError("a lamp fell")))
    hook.on_exception = lambda runner, exception: fail(ValueError("another one"))
    with pytest.raises(RuntimeError, match="a lamp fell"):
        run(tmp_path, hook).train()
    assert " - ERROR - function.on_exception: another one\n" in log_file(tmp_path)


def fail_on_every_rank(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    runner = run(folder, At(5, lambda: fail(RuntimeError(f"lamp {rank} fell"))))
    with pytest.raises(RuntimeError, match="lamp"):
        runner.train()
    runner.strategy.leave()


@pytest.mark.distributed
def test_the_file_has_the_failures_of_all_ranks(tmp_path: Path, workers2: WorkerGroup) -> None:
    workers2.run(fail_on_every_rank, tmp_path)
    text = log_file(tmp_path)
    assert text.count("Traceback") == 2
    where = r"after epoch 1, iteration 4 in custom_hooks \(At.after_train_iter\), \S+: RuntimeError"
    assert re.search(rf" - ERROR - Failed on rank 0 {where}: lamp 0 fell; resume=True continues", text)
    assert re.search(rf" - ERROR - rank 1 - Failed {where}: lamp 1 fell\nTraceback", text)
    own = file_of_rank(tmp_path, 1)
    assert own.count("Traceback") == 1
    assert re.search(rf" - ERROR - rank 1 - Failed {where}: lamp 1 fell\nTraceback", own)
    assert not list(tmp_path.glob("*/*_rank0.log")), "rank 0 has the whole log"


def end_rank_1(folder: Path, how: str) -> str:
    rank = int(os.environ["RANK"])
    ends = {"exit": lambda: sys.exit("enough"), "signal": terminate, "interrupt": interrupt}
    # A signal to one process ends all.
    others: Callable[[], object] = (lambda: None) if how == "signal" else lambda: fail(RuntimeError("lamp 0 fell"))
    then = ends[how] if rank == 1 else others
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        epochs = dict(by_epoch=True, max_epochs=10**6 if how == "signal" else 3)
        runner = run(folder, At(5, then), default_hooks=dict(checkpoint=None), train_cfg=epochs)
        with pytest.raises((SystemExit, RuntimeError, KeyboardInterrupt)):
            runner.train()
    runner.strategy.leave()
    return printed.getvalue()


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("exit", r"INFO - rank 1 - Ended by sys\.exit\('enough'\) after epoch 1, iteration 4"),
        (
            "signal",
            r"WARNING - rank 1 - Ended by SIGTERM, which came to rank 1 on \S+ after epoch \d+, iteration \d+; not saved, there is no CheckpointHook",
        ),
        ("interrupt", "INFO - rank 1 - Interrupted after epoch 1, iteration 4"),
    ],
)
def test_the_end_of_another_rank_is_in_a_file_of_its_own(
    tmp_path: Path, workers2: WorkerGroup, how: str, said: str
) -> None:
    _, printed = workers2.run(end_rank_1, tmp_path, how)
    own = file_of_rank(tmp_path, 1)
    first, *trace = own.splitlines()
    assert re.search(f"{said}$", first)
    assert bool(trace) == (how == "interrupt"), "where it was is asked for when something hangs"
    assert not re.search(said, printed), "with hundreds of ranks nobody could read anything else"
    assert not re.search(said, log_file(tmp_path))


# Ctrl-C


@pytest.mark.processes
def test_ctrl_c_ends_with_the_line_that_says_what_to_resume_from(tmp_path: Path) -> None:
    """Without workers: one that is interrupted while it sends a batch prints a traceback of its own."""
    status, rest = ended_by(signal.SIGINT, tmp_path)
    assert status == -signal.SIGINT, "a shell reports 130"
    assert "Traceback" not in rest
    assert re.search(
        r" - INFO - Interrupted after epoch \d+, iteration \d+; resume=True continues from iter_\d+\n.*The run:\n", rest
    )
    assert "Traceback" in log_file(tmp_path / "work"), "it may have been a hang"


def test_ctrl_c_again_does_not_wait_for_the_save_and_leaves_all_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    ended: list[str] = []
    runner = run(tmp_path, At(5, interrupt, lambda: ended.append("here")))
    finish, calls = runner.finish_saving, iter([interrupt])
    monkeypatch.setattr(
        runner, "finish_saving", lambda wait=True: next(calls)() if runner.iter == 4 else finish(wait), raising=True
    )
    with pytest.raises(KeyboardInterrupt):
        runner.train()
    assert ended == ["here"], "the terminal is given back"
    assert "Interrupted again: the checkpoint that was being written may stay incomplete" in log_file(tmp_path)
    assert "Interrupted after epoch 0, iteration 4; resume=True continues from iter_4" in log_file(tmp_path)


def test_other_interruptions_are_shown_as_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(sys, "excepthook", lambda *args: shown.append(args[1]))
    with pytest.raises(KeyboardInterrupt) as caught:
        run(tmp_path, At(5, interrupt)).train()
    sys.excepthook(KeyboardInterrupt, caught.value, None)
    other = KeyboardInterrupt()
    sys.excepthook(KeyboardInterrupt, other, None)
    assert shown == [other]


# SIGTERM


def test_sigterm_ends_training_with_a_line_and_status_143_once_the_save_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = saving.write_shard
    monkeypatch.setattr(saving, "write_shard", lambda *args: (time.sleep(0.3), write(*args))[1])
    saves = dict(checkpoint=dict(by_epoch=False, interval=5, async_save=True))
    ended: list[str] = []
    runner = run(tmp_path, At(5, terminate, lambda: (terminate(), ended.append("here"))), default_hooks=saves)
    with pytest.raises(SystemExit) as caught:
        runner.train()
    assert caught.value.code == 143
    said = (
        " - WARNING - Ended by SIGTERM after epoch 0, iteration 5; saved as iter_5; resume=True continues from iter_5\n"
    )
    assert said in log_file(tmp_path)
    assert ended == ["here"], "the signal that came again meanwhile had no effect"
    assert is_checkpoint(tmp_path / "iter_5")


def test_what_fails_because_of_sigterm_is_not_the_reason(tmp_path: Path) -> None:
    def worker_died() -> None:
        try:
            terminate()
        finally:
            raise RuntimeError("DataLoader worker is killed by signal: Terminated.")

    with pytest.raises(SystemExit) as caught:
        run(tmp_path, At(5, worker_died)).train()
    assert caught.value.code == 143
    assert "Ended by SIGTERM after" in log_file(tmp_path)
    assert "Failed" not in log_file(tmp_path)


def test_a_handler_of_the_program_stays(tmp_path: Path) -> None:
    heard: list[int] = []

    def mine(number: int, frame: Any) -> None:
        heard.append(number)

    signal.signal(signal.SIGTERM, mine)
    runner = run(tmp_path, At(5, terminate))
    runner.train()
    assert (heard, runner.epoch) == ([signal.SIGTERM], 3)
    assert signal.getsignal(signal.SIGTERM) is mine


def test_without_a_run_the_signal_does_what_it_always_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_ever: list[int] = []
    monkeypatch.setattr("flextrain.runner.signals._as_ever", lambda number, frame: as_ever.append(number))
    runner = run(tmp_path)
    runner.train()
    with pytest.raises(SystemExit):
        terminate()
    assert not as_ever, "the program still has a run, whose other processes would wait"
    del runner
    gc.collect()
    terminate()
    assert as_ever == [signal.SIGTERM]


def test_training_in_another_thread_ends_there(tmp_path: Path) -> None:
    runner = run(tmp_path, At(5, terminate))
    ended: list[Any] = []

    def train() -> None:
        try:
            runner.train()
        except SystemExit as end:
            ended.append(end.code)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert ended == [143]
    assert runner.epoch == 0


@pytest.mark.processes
def test_a_forked_child_dies_of_the_signal_as_ever(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    runs = fork.Event()
    child = fork.Process(target=lambda: (runs.set(), time.sleep(20)))

    def end_the_child() -> None:
        child.start()
        runs.wait()
        child.terminate()
        child.join()

    run(tmp_path, At(5, end_the_child)).train()
    assert child.exitcode == -signal.SIGTERM
