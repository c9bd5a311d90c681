"""What all processes have to call: one that is alone in it, or meets others elsewhere, says so within the strategy's time."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

import pytest

from flextrain import FlexibleRunner
from flextrain.core.comm import collectives as dist
from flextrain.core.comm import matched_calls
from flextrain.core.errors import CheckpointError, StrategyError
from flextrain.testing import WorkerGroup

from .training import make_runner, validation

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("quick")]


def small(folder: Path, timeout_s: float = 30.0, **changes: Any) -> FlexibleRunner:
    runner = make_runner(folder, strategy=dict(type="DDPStrategy"), **validation(), **changes)
    runner.strategy.config = runner.strategy.config.model_copy(update={"timeout_s": timeout_s})
    return runner


def save(runner: FlexibleRunner) -> None:
    runner.save_checkpoint(runner.work_dir, "by_hand")


def load(runner: FlexibleRunner) -> None:
    runner.load_checkpoint(Path(runner.work_dir) / "by_hand")


def resume(runner: FlexibleRunner) -> None:
    runner.resume(Path(runner.work_dir) / "by_hand")


CALLS = {
    "save_checkpoint(by_hand)": save,
    "load_checkpoint()": load,
    "resume()": resume,
    "val()": FlexibleRunner.val,
    "train()": FlexibleRunner.train,
}


def heard(runner: FlexibleRunner, name: str) -> tuple[str, float]:
    began = time.monotonic()
    try:
        CALLS[name](runner)
    except (CheckpointError, StrategyError) as error:
        return str(error), time.monotonic() - began
    return "", time.monotonic() - began


def each_alone(folder: Path) -> list[tuple[str, float]]:
    """Rank 0 makes each call 2 seconds before rank 1 does, and waits 0.5 seconds only."""
    runner = small(folder, 0.5)
    runner.model  # noqa: B018 - set up, by all
    answers = []
    for name in CALLS:
        dist.barrier()
        time.sleep(1.2 * runner.rank)
        answers.append(heard(runner, name))
    dist.barrier()
    runner.strategy.meet("the end")
    runner.strategy.teardown()
    return answers


def test_one_process_alone_in_a_call(workers2: WorkerGroup, tmp_path: Path) -> None:
    first, second = workers2.run(each_alone, tmp_path)
    for name, (early, waited), (late, _) in zip(CALLS, first, second, strict=True):
        assert "rank 1 did not come within 0.5 s" in early
        assert early.startswith(f"{tmp_path / 'by_hand'}: could not" if "save" in name else f"{name}: ")
        assert waited < 2
        assert f"came too late, rank 0 waited in {name} for 0.5 s" in late


def in_two_calls(folder: Path, *names: str) -> tuple[str, float]:
    runner = small(folder)
    runner.model  # noqa: B018 - set up, by all
    answer = heard(runner, names[runner.rank])
    runner.strategy.teardown()
    return answer


@pytest.mark.parametrize("names", [("save_checkpoint(by_hand)", "val()"), ("train()", "load_checkpoint()")])
def test_two_processes_in_different_calls(workers2: WorkerGroup, tmp_path: Path, names: tuple[str, str]) -> None:
    first, second = workers2.run(in_two_calls, tmp_path, *names)
    assert f"rank 1 is in {names[1]}; every process has to" in first[0]
    assert f"rank 0 is in {names[0]}; every process has to" in second[0]
    assert max(first[1], second[1]) < 10


def second_runner(folder: Path) -> str:
    """Only rank 0 makes another runner, in the group that is there."""
    runner, message = small(folder), ""
    if os.environ["RANK"] == "0":
        with pytest.raises(StrategyError) as caught:
            make_runner(folder / "more", strategy=dict(type="DDPStrategy", timeout_s=0.5))
        message = str(caught.value)
    else:
        time.sleep(1)
    runner.strategy.teardown()
    return message


def test_a_runner_that_only_one_makes(workers2: WorkerGroup, tmp_path: Path) -> None:
    message, _ = workers2.run(second_runner, tmp_path)
    expected = "FlexibleRunner(): rank 1 did not come within 0.5 s, last seen in FlexibleRunner(); every process has to"
    assert message.startswith(expected)


def waited_for(folder: Path) -> list[str]:
    """What is logged while rank 0 waits a second for rank 1, and may wait 20."""
    runner, lines = small(folder, 20.0), Lines()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matched_calls, "SILENT_S", 0.2)
        runner.logger.addHandler(lines)
        runner.logger.setLevel("WARNING")
        time.sleep(runner.rank)
        runner.val()
        runner.logger.removeHandler(lines)
    runner.strategy.teardown()
    return lines.found


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())


def test_one_that_waits_says_for_whom(workers2: WorkerGroup, tmp_path: Path) -> None:
    assert workers2.run(waited_for, tmp_path) == [["val(): waiting for rank 1, for 20 s at most"], []]
