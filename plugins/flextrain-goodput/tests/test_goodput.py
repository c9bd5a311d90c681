"""The ledger of a job adds up to its time, and says where it went, also over kills of known length."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from flextrain_goodput import GoodputHook, hook, ledger_of
from flextrain_goodput import command as goodput_command
from flextrain_goodput.ledger import KINDS, duration, summary
from torch import nn, rand
from torch.utils.data import TensorDataset

from flextrain import BaseMetric, ConfigError, FlexibleRunner, Hook, read_events

# From events


def spent(when: float, iter: int, began: float, queued_until: float | None = None, **seconds: float) -> dict[str, Any]:
    zeros = dict.fromkeys(("start_up", "first", "training", "waiting", "evaluation", "saving"), 0.0)
    return {
        "event": "spent", "time": when, "iter": iter, "began": began, "queued_until": queued_until, "spent": zeros | seconds,
    }  # fmt: skip


def event(when: float, name: str, **facts: Any) -> dict[str, Any]:
    return {"event": name, "time": when, **facts}


KILLED = [
    spent(110, 0, began=100, start_up=10),
    spent(120, 10, began=100, start_up=10, first=1, training=10),
    event(121, "saved"),
    spent(131, 20, began=100, start_up=10, first=1, training=20, saving=1),
    event(135, "failed", agent=True),
    event(136, "restarted"),
    spent(150, 10, began=140, start_up=10),
    spent(160, 20, began=140, start_up=10, first=1, training=10),
    event(161, "finished"),
]


def test_a_killed_job() -> None:
    """Ten of the first start's updates are made again; five seconds are not known, five are the restart."""
    ledger = ledger_of(KILLED)
    took = dict(useful=20, repeated=10, saving=1, lost=5, restarting=5)
    assert ledger.seconds == pytest.approx({**dict.fromkeys(KINDS, 0.0), **took, "start-up": 20})
    assert ledger.seconds_in_all == pytest.approx(161 - 100)
    assert [(start.first, start.keeps, start.how) for start in ledger.starts] == [
        (0, 10, "failed"),
        (10, 20, "finished"),
    ]
    assert ledger.failures == 1
    assert ledger.best_interval_s() == pytest.approx((2 * 1 * (35 + 21)) ** 0.5)


def test_what_a_start_that_ended_without_a_word_did_last_is_lost() -> None:
    """The restart says when that was noticed."""
    ledger = ledger_of([one for one in KILLED if one["event"] != "failed"])
    assert (ledger.seconds["lost"], ledger.seconds["restarting"]) == (pytest.approx(6), pytest.approx(4))


def test_what_was_saved_before_a_kill_is_useful_without_a_record() -> None:
    events = [
        spent(0, 0, began=0),
        spent(10, 10, began=0, training=10),
        event(15, "saved", iter=15),
        event(18, "failed"),
    ]
    ledger = ledger_of([*events, spent(20, 15, began=20), spent(30, 25, began=20, training=10), event(30, "finished")])
    assert (ledger.seconds["useful"], ledger.seconds["lost"], ledger.seconds["repeated"]) == (25, 3, 0)


def test_nothing_is_lost_after_the_end() -> None:
    ledger = ledger_of([*KILLED, event(200, "ended")])
    assert ledger.seconds == ledger_of(KILLED).seconds


def test_the_first_update_of_a_start_compiles() -> None:
    ledger = ledger_of([spent(10, 0, began=0), spent(50, 11, began=0, first=20, training=40)])
    assert ledger.seconds["compiling"] == pytest.approx(18)  # the others take 2 s each
    assert ledger.seconds["useful"] == pytest.approx(22)


def test_updates_between_records_are_divided_evenly() -> None:
    records = [
        spent(0, 0, began=0),
        spent(10, 10, began=0, first=1, training=10),
        spent(30, 20, began=0, first=1, training=30),
    ]
    ledger = ledger_of([*records, spent(40, 15, began=40)])
    assert ledger.seconds["useful"] == pytest.approx(20)
    assert ledger.seconds["repeated"] == pytest.approx(10)


def test_a_start_that_saves_nothing_is_all_repeated() -> None:
    """Also by a start after the next, and once only."""
    starts = [[spent(t, 0, began=t), spent(t + 10, 5, began=t, first=2, training=10)] for t in (0, 20)]
    ledger = ledger_of([*starts[0], *starts[1], spent(40, 0, began=40), spent(50, 5, began=40, first=2, training=10)])
    assert ledger.seconds["repeated"] == pytest.approx(20)
    assert ledger.seconds["useful"] == pytest.approx(10)
    assert ledger.seconds["restarting"] == pytest.approx(20)


def test_time_in_the_queue_is_told_from_restarting() -> None:
    ledger = ledger_of([spent(10, 5, began=0), event(12, "preempted"), spent(120, 5, began=110, queued_until=100)])
    assert (ledger.seconds["queue"], ledger.seconds["restarting"]) == pytest.approx((88, 10))
    assert ledger.failures == 0


def test_the_time_after_a_run_that_has_finished_does_not_count() -> None:
    ledger = ledger_of([spent(0, 0, began=0), event(10, "finished"), spent(1000, 5, began=1000)])
    assert ledger.seconds["restarting"] == 0


def test_what_would_gain_most() -> None:
    assert summary(ledger_of(KILLED)) == (
        "Goodput 32.8 % of 1 min 01 s in 2 starts; lost most to start-up, 32.8 %: keep what is made at start, such as indices of data, "
        "and start fewer times"
    )
    assert (
        summary(ledger_of([spent(100, 50, began=0, training=100, first=2)]))
        == "Goodput 100.0 % of 1 min 40 s in 1 start"
    )
    lots = [
        spent(0, 0, began=0),
        spent(900, 900, began=0, first=1, training=900),
        event(900, "saved"),
        event(900, "failed"),
    ]
    lots += [spent(900, 100, began=900, saving=8), spent(1000, 200, began=900, first=1, training=100, saving=2)]
    assert "lost most to repeated updates, 79.8 %: save more often, every 1 min" in summary(ledger_of(lots))


@pytest.mark.parametrize(
    ("seconds", "said"), [(3.21, "3.2 s"), (310, "5 min 10 s"), (3599.9, "1 h 00 min"), (7440, "2 h 04 min")]
)
def test_durations(seconds: float, said: str) -> None:
    assert duration(seconds) == said


# Of runs


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, x: Any, y: Any) -> Any:
        return {"loss": (self.layer(x) - y).square().mean()}


def restarts() -> int:
    return int(os.environ.get("FLEXTRAIN_RESUME", "0"))


class Works(Hook):
    """1,000 s in every update and 2,500 s in validation by the clock that is given, else a tenth of a second in every update."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        time.sleep(0.1) if self.clock is None else self.clock.pass_by(1000)

    def before_val_epoch(self, runner: Any) -> None:
        if self.clock is not None:
            self.clock.pass_by(2500)


class Clock:
    """The hook's clock, which real seconds hardly move beside those that are said to have passed."""

    def __init__(self) -> None:
        self.passed = 0.0

    def pass_by(self, seconds: float) -> None:
        self.passed += seconds

    def time(self) -> float:
        return time.time() + self.passed

    def monotonic(self) -> float:
        return time.monotonic() + self.passed


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """In the hook's place of `time`; the first training of the process does not begin with the process."""
    found = Clock()
    monkeypatch.setattr(hook, "time", found)
    monkeypatch.setattr(hook, "_trainings", 1)
    return found


def run(folder: Path | str, epochs: int, hooks: Sequence[Hook] = (), clock: Clock | None = None, **more: Any) -> Any:
    x = rand(32, 8)
    loader = dict(dataset=TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, collate_fn="default_collate")
    runner = FlexibleRunner(
        model=Net, train_dataloader=loader, optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)), work_dir=str(folder),
        custom_hooks=[Works(clock), GoodputHook(interval_s=1500 if clock else 0.15), *hooks], train_cfg=dict(max_epochs=epochs), **more,
    )  # fmt: skip
    runner.train()
    runner.close()
    return runner


def test_a_run_that_goes_on(tmp_path: Path, clock: Clock) -> None:
    first = run(tmp_path, 1, clock=clock)
    assert float(first.message_hub.get_scalar("train/goodput").current()) == pytest.approx(1, rel=0.02)
    clock.pass_by(3000)
    second = run(tmp_path, 3, clock=clock, resume=True)
    ledger = ledger_of(read_events(tmp_path))
    assert [(start.first, start.keeps) for start in ledger.starts] == [(0, 4), (4, 12)]
    assert ledger.seconds["useful"] == pytest.approx(12_000, rel=0.02)
    assert ledger.seconds["repeated"] == 0
    assert ledger.goodput == pytest.approx(1, rel=0.02)  # a run that has finished waits for nothing
    assert float(second.message_hub.get_scalar("train/goodput").current()) == pytest.approx(ledger.goodput, rel=0.02)


class Nothing(BaseMetric):
    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results.append(1)

    def compute_metrics(self, results: list[int]) -> dict[str, float]:
        return {"batches": float(len(results))}


def test_validation_is_no_training(tmp_path: Path, clock: Clock) -> None:
    x = rand(8, 8)
    loader = dict(dataset=TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, collate_fn="default_collate")
    run(tmp_path, 2, clock=clock, val_dataloader=loader, val_cfg=dict(), val_evaluator=dict(type=Nothing))
    ledger = ledger_of(read_events(tmp_path))
    assert ledger.seconds["evaluation"] == pytest.approx(5000, rel=0.02)
    assert ledger.seconds["useful"] == pytest.approx(8000, rel=0.02)


@pytest.mark.parametrize("interval", [0, -1.0, float("nan")])
def test_a_wrong_interval(interval: float) -> None:
    with pytest.raises(ConfigError, match=r"^GoodputHook.interval_s: .* is not allowed, give more than 0"):
        GoodputHook(interval_s=interval)


def arguments(folder: Path, as_json: bool) -> argparse.Namespace:
    return argparse.Namespace(work_dir=str(folder), json=as_json)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="has no record"):
        goodput_command.run(arguments(tmp_path, False))
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in KILLED))
    assert goodput_command.run(arguments(tmp_path, True)) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["goodput"] == pytest.approx(20 / 61)
    assert goodput_command.run(arguments(tmp_path, False)) == 0
    assert "32.8 %" in capsys.readouterr().out
    assert goodput_command.row_of_report(tmp_path) == summary(ledger_of(KILLED))
    assert goodput_command.row_of_report(tmp_path / "other") == ""


SCRIPT = """
import os
import signal
import sys
import time

sys.path.insert(0, {tests!r})
from test_goodput import Hook, restarts, run


class Dies(Hook):
    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if restarts() < 2 and runner.iter == 9 + 4 * restarts():
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    run({folder!r}, 5, hooks=[Dies()])
"""


@pytest.mark.processes
@pytest.mark.full
def test_kills_of_known_length(tmp_path: Path) -> None:
    """Updates of a tenth of a second, saved after each epoch of four."""
    (tmp_path / "train.py").write_text(SCRIPT.format(tests=str(Path(__file__).parent), folder=str(tmp_path / "run")))
    begin = time.time()
    command = [sys.executable, "-m", "flextrain", "run", "--max-restarts", "3", "--nproc-per-node", "1", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    took = time.time() - begin
    assert done.returncode == 0, done.stderr
    ledger = ledger_of(read_events(tmp_path / "run"))
    assert [(start.first, start.keeps) for start in ledger.starts] == [(0, 8), (8, 12), (12, 20)]
    assert ledger.failures == 2
    assert ledger.seconds["useful"] > 1.9  # twenty updates
    assert 0.1 < ledger.seconds["repeated"] < 0.5 * ledger.seconds["useful"]  # up to updates 9 and 10, and 13 and 14
    assert ledger.seconds["lost"] > 0  # until `flextrain run` has noticed
    assert ledger.seconds_in_all <= took
