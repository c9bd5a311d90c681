"""What all processes have to call: one that is alone in it, or meets others elsewhere, says so within the strategy's time."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from flextrain import FlexibleRunner
from flextrain.core.base.errors import CheckpointError, StrategyError
from flextrain.core.comm import agreement as matched_calls
from flextrain.core.comm import collectives as dist
from flextrain.strategies.parts import meet
from flextrain.testing import WorkerGroup

from ..waiting import wait_until
from .training import log_lines, make_runner, validation

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


def heard(runner: FlexibleRunner, name: str) -> str:
    try:
        CALLS[name](runner)
    except (CheckpointError, StrategyError) as error:
        return str(error)
    return ""


def each_alone(folder: Path) -> list[str]:
    """Rank 1 makes each call when rank 0, which waits half a second, has come out of it."""
    runner = small(folder, 0.5)
    runner.model  # noqa: B018 - set up, by all
    answers = []
    for number, name in enumerate(CALLS):
        came_out = folder / f"rank 0 came out of call {number}"
        dist.barrier()
        if runner.rank == 1:
            wait_until(came_out.exists)
        answers.append(heard(runner, name))
        came_out.touch()
    dist.barrier()
    meet(runner.strategy, "the end")
    runner.strategy.leave()
    return answers


def test_one_process_alone_in_a_call(workers2: WorkerGroup, tmp_path: Path) -> None:
    first, second = workers2.run(each_alone, tmp_path)
    for name, early, late in zip(CALLS, first, second, strict=True):
        assert "rank 1 did not come within 0.5 s" in early
        assert early.startswith(f"{tmp_path / 'by_hand'}: could not" if "save" in name else f"{name}: ")
        assert f"came too late, rank 0 waited in {name} for 0.5 s" in late


def in_two_calls(folder: Path, *names: str) -> str:
    runner = small(folder, 3600.0)  # nobody waits that long: they find out when they meet
    runner.model  # noqa: B018 - set up, by all
    answer = heard(runner, names[runner.rank])
    runner.strategy.leave()
    return answer


@pytest.mark.parametrize("names", [("save_checkpoint(by_hand)", "val()"), ("train()", "load_checkpoint()")])
def test_two_processes_in_different_calls(workers2: WorkerGroup, tmp_path: Path, names: tuple[str, str]) -> None:
    first, second = workers2.run(in_two_calls, tmp_path, *names)
    assert f"rank 1 is in {names[1]}; every process has to" in first
    assert f"rank 0 is in {names[0]}; every process has to" in second


def second_runner(folder: Path) -> str:
    """Only rank 0 makes another runner, in the group that is there."""
    runner, message = small(folder), ""
    if os.environ["RANK"] == "0":
        with pytest.raises(StrategyError) as caught:
            make_runner(folder / "more", strategy=dict(type="DDPStrategy", timeout_s=0.5))
        message = str(caught.value)
    dist.barrier()
    runner.strategy.leave()
    return message


def test_a_runner_that_only_one_makes(workers2: WorkerGroup, tmp_path: Path) -> None:
    message, _ = workers2.run(second_runner, tmp_path)
    expected = "Strategy.join(): rank 1 did not come within 0.5 s, last seen in FlexibleRunner(); every"
    assert message.startswith(expected)


def waited_for(folder: Path) -> list[str]:
    """What is logged while rank 0 waits a second for rank 1, and may wait 20."""
    runner = small(folder, 20.0)
    with pytest.MonkeyPatch.context() as patch, log_lines() as found:
        patch.setattr(matched_calls, "SILENT_S", 0.2)
        runner.logger.setLevel("WARNING")
        time.sleep(runner.rank)
        runner.val()
    runner.strategy.leave()
    return found


def test_one_that_waits_says_for_whom(workers2: WorkerGroup, tmp_path: Path) -> None:
    assert workers2.run(waited_for, tmp_path) == [["val(): waiting for rank 1, for 20 s at most"], []]
