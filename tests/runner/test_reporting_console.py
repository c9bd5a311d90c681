"""The logger's handlers and the progress bar."""

from __future__ import annotations

import io
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from flextrain import ConfigError
from flextrain.core.base.errors import ONLY_IN_FILE
from flextrain.runner.hooks import LoggerHook
from flextrain.runner.reporting import ProgressBar, close_logger, is_interactive, setup_logger
from flextrain.runner.reporting.console import folded


@pytest.fixture(autouse=True)
def _closed_logger() -> Iterator[None]:
    yield
    close_logger()


def test_lines_go_to_console_and_file_once_over_several_runners(tmp_path: Path, capsys: Any) -> None:
    files = [tmp_path / name / "run.log" for name in ("first", "second")]
    for file in files:
        logger = setup_logger("INFO", file)
        logger.info("hello")
        logging.getLogger("flextrain.strategies.ddp").info("from a module")
        logger.debug("not this")
    assert capsys.readouterr().out.count("hello") == 2
    for file in files:
        assert [line.partition(" - INFO - ")[2] for line in file.read_text().splitlines()] == ["hello", "from a module"]
    assert [handler.get_name() for handler in logger.handlers].count("flextrain") == 2


def test_standard_output_may_be_any_object_with_write(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=written.append, flush=lambda: None))
    setup_logger("INFO").info("word " * 100)
    assert "".join(written).count("\n") == 1


def test_handlers_of_others_stay(tmp_path: Path) -> None:
    mine = logging.NullHandler()
    logger = setup_logger("INFO")
    logger.addHandler(mine)
    try:
        setup_logger("INFO")
        close_logger()
        assert mine in logger.handlers
        assert not any(handler.get_name() == "flextrain" for handler in logger.handlers)
    finally:
        logger.removeHandler(mine)


def test_lines_do_not_go_on_to_the_root_logger() -> None:
    output = io.StringIO()
    root = logging.StreamHandler(output)
    logging.getLogger().addHandler(root)
    try:
        setup_logger("INFO").error("only once")
    finally:
        logging.getLogger().removeHandler(root)
    assert output.getvalue() == ""


def test_other_ranks_report_errors_with_their_number_and_write_no_file(tmp_path: Path, capsys: Any) -> None:
    logger = setup_logger("DEBUG", tmp_path / "run.log", rank=3)
    logger.warning("quiet")
    logger.error("loud")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    assert lines[0].endswith(" - flextrain - ERROR - rank 3 - loud")
    assert list(tmp_path.iterdir()) == []


def test_long_lines_for_reference_go_only_to_the_file(tmp_path: Path, capsys: Any) -> None:
    logger = setup_logger("INFO", tmp_path / "run.log")
    logger.info("a" * 1000, extra={ONLY_IN_FILE: True})
    assert "a" * 1000 in (tmp_path / "run.log").read_text()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("level", ["INFOO", 1.5, True, None])
def test_wrong_levels(level: Any) -> None:
    with pytest.raises(ConfigError, match="log_level: "):
        setup_logger(level)


def test_levels_by_name_and_number() -> None:
    assert setup_logger("warning").level == setup_logger(logging.WARNING).level == logging.WARNING


def terminal(width: int = 120) -> tuple[Console, io.StringIO]:
    output = io.StringIO()
    return Console(file=output, force_terminal=True, width=width, _environ={"TERM": "xterm"}), output


def visible(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


def drawn(runner: Any, tag: dict[str, Any] | None = None, evaluation: tuple[str, int, int] | None = None) -> str:
    console, output = terminal()
    bar = ProgressBar(runner, console)
    bar.update(tag or {})
    if evaluation:
        bar.evaluate(*evaluation)
    console.print(bar._draw())
    return visible(output.getvalue()).strip()


def test_the_bar_shows_where_training_stands(new_runner: Callable[..., Any]) -> None:
    runner = new_runner(epoch=1, iter=13)
    runner.train_loop.inner = 3
    runner.message_hub.update_info("eta", 65.0)
    text = drawn(runner, {"loss": 0.12345, "lr": 1e-3, "time": 0.02})
    assert text.startswith("Epoch 2/2 ")
    assert text.endswith("3/10 loss 0.1235  lr 1.00e-03  400 samples/s  eta 0:01:05")


def test_the_bar_after_the_last_epoch_is_full(new_runner: Callable[..., Any]) -> None:
    assert drawn(new_runner(epoch=2, iter=20)).endswith(" 10/10")


def test_the_bar_of_a_loop_without_epochs(new_runner: Callable[..., Any]) -> None:
    runner = new_runner(iter=7)
    runner.train_loop.by_epoch = False
    assert re.fullmatch(r"train \S+ 7/20", drawn(runner))


def test_the_bar_counts_all_ranks_and_micro_batches(new_runner: Callable[..., Any]) -> None:
    runner = new_runner(accumulate=3)
    runner.strategy.topology = SimpleNamespace(data=SimpleNamespace(count=4))
    assert "960 samples/s" in drawn(runner, {"train/time": 0.1, "train/loss": 1.0})


def test_the_bar_does_without_a_batch_size(new_runner: Callable[..., Any]) -> None:
    runner = new_runner()
    runner.train_dataloader.batch_size = None
    assert "samples" not in drawn(runner, {"time": 0.1})


def test_the_bar_follows_validation_and_goes_back_to_training(new_runner: Callable[..., Any]) -> None:
    runner = new_runner()
    assert re.fullmatch(r"val \S+ 3/4", drawn(runner, evaluation=("val", 3, 4)))
    assert drawn(runner, evaluation=("val", 4, 4)).startswith("Epoch 1/2")


def test_log_lines_stand_whole_above_the_bar_and_the_terminal_is_given_back(new_runner: Callable[..., Any]) -> None:
    runner = new_runner()
    console, output = terminal(width=60)
    bar = ProgressBar(runner, console)
    bar.start()
    line = "Epoch(train) [1][10/196]  loss: [bold]4.5[/bold] :smile: " + "x" * 60
    runner.logger.info(line)
    bar.stop()
    text = output.getvalue()
    assert " ".join(line.split()) in " ".join(visible(text).split()), "not taken for markup"
    assert text.index("\x1b[?25l") < text.rindex("\x1b[?25h"), "the cursor is back"
    runner.logger.info("after")
    assert "after" not in output.getvalue()
    assert runner.lines() == [line, "after"]


def test_a_pipe_is_not_interactive(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    assert not is_interactive(Console(file=io.StringIO()))
    assert is_interactive(terminal()[0])
    assert not is_interactive(Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "dumb"}))


def test_long_lines_are_folded_between_fields_and_never_in_a_name() -> None:
    line = "11/22 10:17:25 - flextrain - INFO - Epoch(train) [2][50/63]  lr: 1.0000e-01  eta: 0:00:00  time: 0.0204  loss: 0.4649"
    assert folded(line, 200) == line
    assert folded(line, 80).split("\n") == [
        "11/22 10:17:25 - flextrain - INFO - Epoch(train) [2][50/63]  lr: 1.0000e-01",
        "    eta: 0:00:00  time: 0.0204  loss: 0.4649",
    ]
    assert folded("saved to best_accuracy_epoch_2 and\nanother line", 20).split("\n") == [
        "saved to",
        "    best_accuracy_epoch_2",
        "    and",
        "another line",
    ]
    path = "/a" * 100
    assert folded(path, 80) == path
    for width in range(10, 120):
        lines = folded(line, width).split("\n")
        assert " ".join(lines).split() == line.split()
        assert max(map(len, lines)) <= max(width, 4 + len("Epoch(train)"))


@pytest.mark.parametrize("width", [80, 110])
def test_a_terminal_gets_folded_lines_and_the_file_whole_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", str(width))
    for passed_on in (False, True):
        monkeypatch.setattr(sys, "stdout", screen := Terminal())
        if passed_on:
            monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
        setup_logger("INFO", tmp_path / "run.log").info("word " * 50)
        lines = screen.getvalue().splitlines()
        assert (max(map(len, lines)) <= width) != passed_on
        assert re.match(r"\d\d/\d\d \d\d:\d\d:\d\d " + ("- flextrain - INFO - word" if passed_on else "word"), lines[0])
        assert len((tmp_path / "run.log").read_text().splitlines()) == 1 + passed_on


@pytest.mark.parametrize("variable", ["OMPI_COMM_WORLD_RANK", "PMIX_RANK"])
def test_a_terminal_of_mpiruns_is_not_interactive(
    monkeypatch: pytest.MonkeyPatch, new_runner: Callable[..., Any], variable: str
) -> None:
    """What mpirun passes on from its pseudo-terminals may go to a file."""
    monkeypatch.setenv(variable, "0")
    assert not is_interactive(terminal()[0])
    hook = LoggerHook(tables=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    hook.before_train(new_runner())
    assert hook._bar is None
    hook = LoggerHook(tables=False, progress_bar=True)
    hook.before_train(new_runner())
    assert hook._bar is not None, "who asks for it gets it"
    hook.on_exception(new_runner(), KeyboardInterrupt())


@pytest.mark.processes
@pytest.mark.skipif(not hasattr(os, "fork"), reason="data-loading workers are not forked here")
def test_a_forked_worker_may_print_while_the_bar_is_being_drawn(new_runner: Callable[..., Any]) -> None:
    """A thread that draws holds a lock; in a forked child nobody would ever release it."""
    runner = new_runner()
    console, _ = terminal()
    bar = ProgressBar(runner, console)
    bar.start()
    held, done = threading.Event(), threading.Event()

    def draw() -> None:
        with bar._live._lock, console._lock:
            held.set()
            done.wait(20)

    thread = threading.Thread(target=draw)
    thread.start()
    held.wait()
    pid = os.fork()
    if pid == 0:
        signal.alarm(5)
        print("a worker prints")
        print("and warns", file=sys.stderr)
        runner.logger.info("and logs")
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    done.set()
    thread.join()
    bar.stop()
    assert status == 0, "the child hung"
