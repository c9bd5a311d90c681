"""Lines of a fast loop: their figures wait on the device and are read together, and are what they were when the line was due."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from flextrain import Hook
from flextrain.runner.hooks import logger as line_queue
from flextrain.runner.hooks.logger import LineQueue
from flextrain.runner.reporting import LogProcessor, MessageHub, log_processor

from .training import make_runner, validation

Log = Callable[[], tuple[dict[str, Any], str]]


@pytest.fixture(autouse=True)
def _fixed_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_processor, "memory_mb", lambda device: 970.7)


class Reads(TorchFunctionMode):
    """Counts the copies to the host."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (Tensor.tolist, Tensor.item)
        return func(*args, **(kwargs or {}))


def lines(runner: Any, count: int, make: Callable[..., Log], interval: int = 3) -> Iterator[Log]:
    """What is made of so many lines, one after every ``interval`` iterations, before any is written."""
    for i in range(count * interval):
        loss = torch.tensor(i / 7)
        runner.message_hub.update_scalars({"train/loss": loss, "train/accuracy": loss * 3, "train/time": i / 3})
        if i % 5 == 0:
            runner.message_hub.update_scalar("train/loss_seldom", i)
        runner.iter = i
        if (i + 1) % interval == 0:
            yield make(runner, i, "train")


def at_once(runner: Any, *args: Any) -> Log:
    log = runner.log_processor.get_log_after_iter(runner, *args)
    return lambda: log


def later(runner: Any, *args: Any) -> Log:
    made: Log = runner.log_processor.later_log_after_iter(runner, *args)
    return made


@pytest.mark.parametrize("window", [1, 3, 10, 40])
@pytest.mark.parametrize("kept", [100, 40, 7])
def test_figures_are_those_of_the_line(new_runner: Callable[..., Any], window: int, kept: int) -> None:
    def logs(make: Callable[..., Log]) -> list[Log]:
        runner = new_runner(log_processor=LogProcessor(window_size=window), message_hub=MessageHub(history=kept))
        runner.log_processor.prepare(runner, "train")
        return list(lines(runner, 60, make))

    expected = [log() for log in logs(at_once)]
    assert [log() for log in logs(later)] == expected
    assert [log() for log in reversed(logs(later))] == expected[::-1], "in whatever order they are written"


def test_several_lines_are_read_in_one_copy(new_runner: Callable[..., Any]) -> None:
    runner = new_runner()
    with Reads() as reads:
        made = list(lines(runner, 16, later))
        assert (reads.count, runner.message_hub.readings) == (0, 0)
        for log in made:
            log()
    assert (reads.count, runner.message_hub.readings) == (1, 1)
    with Reads() as reads:
        list(lines(runner, 17, later))
    assert reads.count == 1, "half of what is kept is unread"


def test_what_somebody_reads_in_between_is_read_once_more(new_runner: Callable[..., Any]) -> None:
    runner = new_runner()
    made = []
    for log in lines(runner, 8, later):
        runner.message_hub.get_scalar("train/loss").current()
        made.append(log)
    expected = [log()[0] for log in lines(new_runner(), 8, at_once)]
    assert [log()[0] for log in made] == expected


def test_who_wants_every_line_read_gets_it(new_runner: Callable[..., Any]) -> None:
    custom = LogProcessor(custom_cfg=[dict(data_src="loss", log_name="best", method_name="min")])
    for runner in (new_runner(), new_runner(log_processor=custom)):
        runner.message_hub.reads_every_line = runner.log_processor is not custom
        assert len(list(lines(runner, 5, later))) == runner.message_hub.readings == 5
    runner = new_runner()
    runner.message_hub.update_scalar("train/loss", torch.tensor(8.0), count=4)
    log = later(runner, 0, "train")
    assert (runner.message_hub.readings, log()[0]["loss"]) == (1, 2.0), "sums over several items"


class Schedule(Hook):
    """A learning rate that is a tensor, and changed in place."""

    priority = "LOWEST"

    def before_train(self, runner: Any) -> None:
        self.rate = runner.optim_wrapper.param_groups[0]["lr"] = torch.tensor(0.5)

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        self.rate *= 0.5


class Tempered(nn.Module):
    """Logs a parameter, a part of one, and a buffer, all of which change later."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.scale = nn.Linear(6, 2), nn.Parameter(torch.ones(2))
        self.register_buffer("seen", torch.zeros(()))
        self.was: list[list[float]] = []

    def forward(self, x: Tensor, y: Tensor, index: Tensor) -> dict[str, Tensor]:
        self.seen += 1
        logits = self.net(x) * self.scale.prod()
        self.was.append([float(self.scale[0].detach()), float(self.seen)])
        return {"loss": nn.functional.cross_entropy(logits, y), "scale": self.scale[0], "seen": self.seen}


class Kept(Hook):
    def __init__(self) -> None:
        self.found: list[list[Tensor]] = []

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        self.found.append([outputs["scale"], outputs["seen"]])


def test_a_parameter_in_the_log_is_what_it_was(tmp_path: Path) -> None:
    """Nothing is read before the end, when all of them have changed."""
    kept = Kept()
    runner = make_runner(
        tmp_path, model=Tempered, train_cfg=dict(by_epoch=False, max_iters=4), custom_hooks=[kept], val_cfg=None
    )
    runner.train()
    assert [[float(value) for value in values] for values in kept.found] == runner.model.was


@pytest.mark.parametrize("hold_s", [0.0, 60.0], ids=["slow", "fast"])
def test_a_run_writes_the_same_lines_at_any_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hold_s: float
) -> None:
    monkeypatch.setattr(line_queue, "HOLD_S", hold_s)
    runner = make_runner(
        tmp_path,
        train_cfg=dict(by_epoch=False, max_iters=8, val_interval=4),
        **validation(),
        default_hooks=dict(logger=dict(interval=2)),
        custom_hooks=[Schedule()],
        log_level="INFO",
    )
    runner.train()
    found = [line for path in tmp_path.rglob("*.log") for line in path.read_text().splitlines() if "lr: " in line]
    rates = [float(line.partition("lr: ")[2].split()[0]) for line in found]
    assert all("  eta: 0:00:0" in line for line in found), "also on lines that a validation brings forward"
    assert rates == pytest.approx([0.5 * 0.5 ** (done - 1) for done in (2, 4, 6, 8)], rel=1e-3)


def test_lines_that_cannot_be_written_do_not_keep_the_reason_from_being_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logger = logging.getLogger("flextrain.test_of_waiting_lines")
    queue = LineQueue()
    queue.open(logger)
    queue.put(lambda: None)

    def fail() -> None:
        raise RuntimeError("device lost")

    queue.put(fail)
    logger.error("Training ended: device lost")
    queue.close()
    assert [record.getMessage() for record in caplog.records] == [
        "Pending log lines could not be written: device lost",
        "Training ended: device lost",
    ]


def test_pending_lines_are_written_where_they_were_put(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by a background save that logs, and not by a forked worker of the dataloader, where they would come twice."""
    logger = logging.getLogger("flextrain.test_of_waiting_lines")
    written: list[int] = []
    queue = LineQueue()
    queue.open(logger)
    for i in range(2):
        queue.put(partial(written.append, i))
    assert written == [0]
    thread = threading.Thread(target=logger.error, args=("a save failed",))
    thread.start()
    thread.join()
    assert written == [0]
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(os, "getpid", lambda: -1)
        logger.error("in a worker")
    assert written == [0]
    logger.error("here")
    assert written == [0, 1]
    queue.close()
