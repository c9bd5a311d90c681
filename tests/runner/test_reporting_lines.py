"""LogProcessor: the lines of the seeds, to the character, and the records that go with them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from flextrain import ConfigError
from flextrain.runner.reporting import HistoryBuffer, LogProcessor, MessageHub, build_log_processor, log_processor

from .training import log_lines, refuses

MEMORY_MB = 970.7


@pytest.fixture(autouse=True)
def _fixed_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_processor, "memory_mb", lambda device: MEMORY_MB)


def train_iterations(runner: Any, count: int, first: int = 0) -> None:
    """What the default hooks put into the hub during ``count`` iterations."""
    for i in range(first, first + count):
        runner.message_hub.update_scalar("train/lr", 1e-3 / 3)
        runner.message_hub.update_scalar("train/data_time", 0.0335)
        runner.message_hub.update_scalar("train/loss", torch.tensor(float(i)))
        runner.message_hub.update_scalar("train/time", 0.4073)
        runner.iter = i
    runner.message_hub.update_info("eta", 13 * 60 + 14.9)


def seed_runner(new_runner: Callable[..., Any], **changes: Any) -> Any:
    loop = SimpleNamespace(by_epoch=True, epoch_length=196, max_iters=1960)
    return new_runner(
        train_loop=loop, max_epochs=10, max_iters=1960, val_loop=SimpleNamespace(num_batches=40), **changes
    )


def test_train_line_and_record_of_the_seeds(new_runner: Callable[..., Any]) -> None:
    runner = seed_runner(new_runner)
    train_iterations(runner, 10)
    record, line = runner.log_processor.get_log_after_iter(runner, 9, "train")
    assert line == (
        "Epoch(train) [1][ 10/196]  lr: 3.3333e-04  eta: 0:13:14  time: 0.4073  data_time: 0.0335  memory: 970  loss: 4.5000"
    )
    assert record == pytest.approx(
        {"lr": 1e-3 / 3, "data_time": 0.0335, "loss": 4.5, "time": 0.4073, "epoch": 1, "iter": 10, "memory": 970}
    )
    assert list(record) == ["lr", "data_time", "loss", "time", "epoch", "iter", "memory"]


def test_means_are_over_the_last_window_only(new_runner: Callable[..., Any]) -> None:
    runner = seed_runner(new_runner, log_processor=LogProcessor(window_size=4))
    train_iterations(runner, 10)
    assert runner.log_processor.get_log_after_iter(runner, 9, "train")[0]["loss"] == 7.5
    train_iterations(runner, 2, first=10)
    assert runner.log_processor.get_log_after_iter(runner, 11, "train")[0]["loss"] == 9.5


def test_names_that_match_the_pattern_show_a_mean_and_others_the_newest_value(new_runner: Callable[..., Any]) -> None:
    runner = seed_runner(new_runner)
    for i in range(4):
        runner.message_hub.update_scalar("train/grad_norm", float(i))
        runner.message_hub.update_scalar("train/accuracy", float(i))
        runner.message_hub.update_scalar("train/head.lr", float(i))
        runner.message_hub.update_scalar("train/norm/time_embed", float(i))  # "time" as a word only
    record, line = runner.log_processor.get_log_after_iter(runner, 3, "train")
    assert (record["grad_norm"], record["accuracy"], record["head.lr"]) == (1.5, 3.0, 3.0)
    assert record["norm/time_embed"] == 3.0
    assert line.endswith(
        "]  head.lr: 3.0000e+00  memory: 970  grad_norm: 1.5000  accuracy: 3.0000  norm/time_embed: 3.0000"
    )
    other = LogProcessor(mean_pattern="acc")
    record = other.get_log_after_iter(runner, 3, "train")[0]
    assert (record["grad_norm"], record["accuracy"]) == (3.0, 1.5)


def test_a_key_that_comes_late_is_shown(new_runner: Callable[..., Any]) -> None:
    runner = seed_runner(new_runner)
    train_iterations(runner, 1)
    runner.log_processor.get_log_after_iter(runner, 0, "train")
    runner.message_hub.update_scalar("train/loss_aux", 2.0)
    assert runner.log_processor.get_log_after_iter(runner, 0, "train")[1].endswith("loss: 0.0000  loss_aux: 2.0000")


def test_only_what_was_updated_since_the_last_line_is_shown(new_runner: Callable[..., Any]) -> None:
    runner = seed_runner(new_runner)
    shown = []
    for iteration, keys in enumerate(("ab", "a", "ab", "b")):
        runner.iter = iteration
        for key in keys:
            runner.message_hub.update_scalar(f"train/{key}", 1.0)
        runner.message_hub.fetch()  # as a checkpoint does
        records = [runner.log_processor.get_log_after_iter(runner, iteration, "train")[0] for _ in range(2)]
        assert records[0] == records[1], "a second reader sees the same"
        shown.append([key for key in records[0] if key in ("a", "b")])
    assert shown == [["a", "b"], ["a"], ["a", "b"], ["b"]]


@pytest.mark.parametrize("mode", ["train", "val"])
def test_what_only_the_resumed_checkpoint_has_is_not_shown(new_runner: Callable[..., Any], mode: Any) -> None:
    before, runner = MessageHub(), seed_runner(new_runner)
    for value in (1.0, 3.0):
        before.update_scalars({f"{mode}/loss": value, f"{mode}/grad_norm": value})
    runner.message_hub.load_state_dict(before.state_dict())
    runner.message_hub.update_scalar(f"{mode}/loss", 5.0)
    processor = runner.log_processor
    record, line = (processor.get_log_after_iter if mode == "train" else processor.get_log_after_epoch)(runner, 3, mode)
    assert "grad_norm" not in record
    assert record["loss"] == (3.0 if mode == "train" else 5.0), "the window goes on"
    assert "grad_norm" not in line
    assert runner.message_hub.get_scalar(f"{mode}/grad_norm").values == [1.0, 3.0], "the next checkpoint has it still"


def test_line_of_a_loop_without_epochs(new_runner: Callable[..., Any]) -> None:
    runner = new_runner(max_iters=1000, log_processor=LogProcessor(by_epoch=False))
    train_iterations(runner, 10)
    record, line = runner.log_processor.get_log_after_iter(runner, 9, "train")
    assert line.startswith("Iter(train) [  10/1000]  lr: 3.3333e-04  eta: 0:13:14  time: 0.4073  ")
    assert (record["iter"], "epoch" in record) == (10, False)
    runner.message_hub.update_scalar("val/accuracy", 10.0)
    assert runner.log_processor.get_log_after_epoch(runner, 4, "val")[1] == "Iter(val) [4/4]    accuracy: 10.0000"


def test_validation_lines(new_runner: Callable[..., Any]) -> None:
    runner = seed_runner(new_runner)
    runner.epoch = 1
    runner.log_processor.prepare(runner, "val")
    for i in range(40):
        runner.message_hub.update_scalar("val/data_time", 0.005 if i < 30 else 0.085)
        runner.message_hub.update_scalar("val/time", 0.04 if i < 30 else 0.08)
        runner.message_hub.update_info("eta", 1.5)
        if i == 9:
            line = runner.log_processor.get_log_after_iter(runner, 9, "val")[1]
            assert line == "Epoch(val) [1][10/40]    eta: 0:00:01  time: 0.0400  data_time: 0.0050  memory: 970"
    runner.message_hub.update_scalar("val/accuracy", 10.0)
    record, line = runner.log_processor.get_log_after_epoch(runner, 40, "val")
    assert line == "Epoch(val) [1][40/40]    accuracy: 10.0000  data_time: 0.0250  time: 0.0500"
    assert record == pytest.approx({"accuracy": 10.0, "data_time": 0.025, "time": 0.05})


def test_a_validation_loss_is_that_of_this_validation(new_runner: Callable[..., Any]) -> None:
    runner = new_runner()
    for loss in (4.0, 2.0):
        runner.message_hub.update_scalar("val/loss", loss)
    record, line = runner.log_processor.get_log_after_epoch(runner, 4, "val")
    assert record["loss"] == 2.0
    assert line.endswith("    loss: 2.0000")


def test_times_of_a_long_validation_are_means_over_all_of_it(new_runner: Callable[..., Any]) -> None:
    runner = new_runner(val_loop=SimpleNamespace(num_batches=400))
    runner.log_processor.prepare(runner, "val")
    for _ in range(2):
        for i in range(400):
            runner.message_hub.update_scalar("val/time", float(i))
    assert runner.log_processor.get_log_after_epoch(runner, 400, "val")[0]["time"] == 199.5


def test_test_lines_hold_no_epoch_and_tables_on_request(new_runner: Callable[..., Any]) -> None:
    runner = seed_runner(new_runner)
    runner.message_hub.update_scalar("test/accuracy", 97.5)
    runner.message_hub.update_info("test/confusion", np.eye(2, dtype=int))
    record, line = runner.log_processor.get_log_after_epoch(runner, 4, "test", with_non_scalar=True)
    assert line == "Epoch(test) [4/4]    accuracy: 97.5000  confusion: \n[[1 0]\n [0 1]]\n"
    assert sorted(record) == ["accuracy", "confusion"]
    assert sorted(runner.log_processor.get_log_after_epoch(runner, 4, "test")[0]) == ["accuracy"]


def test_hierarchy_is_for_records_only(new_runner: Callable[..., Any]) -> None:
    runner = seed_runner(new_runner, log_processor=LogProcessor(log_with_hierarchy=True, num_digits=2))
    train_iterations(runner, 10)
    record, line = runner.log_processor.get_log_after_iter(runner, 9, "train")
    assert {"train/lr", "train/loss", "train/time", "iter", "epoch"} <= set(record)
    assert line.endswith("lr: 3.33e-04  eta: 0:13:14  time: 0.41  data_time: 0.03  memory: 970  loss: 4.50")


def test_custom_statistics(new_runner: Callable[..., Any]) -> None:
    custom = [
        {"data_src": "loss", "log_name": "loss_epoch", "window_size": "epoch"},
        {"data_src": "loss", "log_name": "loss_all", "window_size": "global"},
        {"data_src": "train/loss", "log_name": "loss_max", "method_name": "max", "window_size": 150},
        {"data_src": "lr", "method_name": "min"},
        {"data_src": "loss", "method_name": "current"},
        {"data_src": "val/loss", "log_name": "never"},
    ]
    runner = seed_runner(new_runner, log_processor=LogProcessor(custom_cfg=custom))
    runner.log_processor.prepare(runner, "train")
    train_iterations(runner, 196)
    runner.log_processor.get_log_after_iter(runner, 195, "train")
    runner.epoch = 1
    train_iterations(runner, 10, first=196)
    record = runner.log_processor.get_log_after_iter(runner, 9, "train")[0]
    assert record["loss_epoch"] == 200.5
    assert record["loss_all"] == 102.5
    assert record["loss_max"] == record["loss"] == 205.0
    assert record["lr"] == 1e-3 / 3
    assert "never" not in record


def test_a_scalar_that_is_never_there_is_told(new_runner: Callable[..., Any]) -> None:
    custom = [
        {"data_src": name, "log_name": str(i)}
        for i, name in enumerate(("los", "val/accurcy", "loss", "accuracy", "lr2"))
    ]
    processor = LogProcessor(custom_cfg=custom)
    runner = seed_runner(new_runner, log_processor=processor)
    with log_lines() as said:
        processor.prepare(runner, "train")
        train_iterations(runner, 10)
        for _ in range(2):
            processor.get_log_after_iter(runner, 9, "train")
        assert not said  # each may be of the validation
        runner.message_hub.update_scalar("val/accuracy", 97.5)
        for _ in range(2):
            processor.get_log_after_epoch(runner, 4, "val")
    assert [line for line in said if "data_src" in line] == [
        'log_processor.custom_cfg[0].data_src: no scalar "los" so far, did you mean "loss"?',
        'log_processor.custom_cfg[1].data_src: no scalar "val/accurcy" so far, did you mean "accuracy"?',
        'log_processor.custom_cfg[4].data_src: no scalar "lr2" so far, did you mean "lr"?',
    ]


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        ({"window_size": 0}, "log_processor.window_size: 0 is not allowed"),
        ({"windowsize": 5}, 'log_processor.windowsize: unknown key, did you mean "window_size"?'),
        ({"num_digits": "4"}, "log_processor.num_digits:"),
        ({"mean_pattern": "("}, 'log_processor.mean_pattern: "(" is no regular expression'),
        ({"custom_cfg": [{"log_name": "x"}]}, "log_processor.custom_cfg[0].data_src: missing"),
        ({"custom_cfg": [{"data_src": "loss", "method": "mean"}]}, "log_processor.custom_cfg[0].method: unknown key"),
        ({"custom_cfg": [{"data_src": "loss", "method_name": "median"}]}, "custom_cfg[0].method_name: "),
        ({"custom_cfg": [{"data_src": "loss", "window_size": "epochs"}]}, "custom_cfg[0].window_size: "),
        ({"custom_cfg": [{"data_src": "loss"}, {"data_src": "loss", "method_name": "max"}]}, "logged twice"),
        (
            {"by_epoch": False, "custom_cfg": [{"data_src": "loss", "window_size": "epoch"}]},
            "has no meaning with by_epoch",
        ),
        ({"type": "LogProcesor"}, "log_processor.type: 'LogProcesor' is not allowed"),
        ([], "log_processor: [] is not allowed"),
    ],
)
def test_wrong_configurations_are_named_on_one_line(cfg: Any, message: str) -> None:
    with refuses(ConfigError, message):
        build_log_processor(cfg, by_epoch=True)


def test_lines_follow_the_loop_unless_told_otherwise() -> None:
    assert not build_log_processor(None, by_epoch=False).by_epoch
    assert not build_log_processor({"type": "LogProcessor", "window_size": 5}, by_epoch=False).by_epoch
    assert build_log_processor({"by_epoch": True}, by_epoch=False).by_epoch
    mine = LogProcessor()
    assert build_log_processor(mine, by_epoch=False) is mine


def test_a_registered_statistic_is_shown_and_its_arguments_are_checked(
    new_runner: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HistoryBuffer, "_statistics_methods", {})

    @HistoryBuffer.register_statistics
    def power_mean(buffer: HistoryBuffer, window_size: int | None = None, power: float = 2.0) -> float:
        values, _ = buffer.data
        return float((values[-(window_size or 0) :] ** power).mean() ** (1 / power))

    entry = dict(data_src="loss", method_name="power_mean", log_name="loss_cubic", window_size=2, power=3.0)
    runner = seed_runner(new_runner, log_processor=LogProcessor(custom_cfg=[entry]))
    train_iterations(runner, 10)
    record, line = runner.log_processor.get_log_after_iter(runner, 9, "train")
    losses = runner.message_hub.get_scalar("train/loss").values[-2:]
    assert record["loss_cubic"] == pytest.approx((sum(loss**3 for loss in losses) / 2) ** (1 / 3))
    assert f"loss_cubic: {record['loss_cubic']:.4f}" in line
    with pytest.raises(ConfigError, match=r'custom_cfg\[0\]\.powr: unknown key, did you mean "power"'):
        LogProcessor(custom_cfg=[dict(data_src="loss", method_name="power_mean", powr=3.0)])
    with pytest.raises(ConfigError, match=r'custom_cfg\[0\]\.method_name: "power_men" is not allowed, .*"power_mean"'):
        LogProcessor(custom_cfg=[dict(data_src="loss", method_name="power_men")])
