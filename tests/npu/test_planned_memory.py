"""The memory of a run in its log beside that of a plan, on a device that counts what it allocates."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from flextrain.plan.plan import Moment, RankPlan, StrategyPlan, TrainingPlan

from .training import make_runner

pytestmark = [pytest.mark.npu, pytest.mark.distributed]
MIB = 2**20


def lines(folder: Path, plan: dict[str, Any], strategy: str, world_size: int, **changes: Any) -> list[str]:
    """The lines of rank 0's log that speak of the plan, of a training of sixteen updates."""
    runner = make_runner(folder, dict(type=strategy), world_size, env_cfg=dict(plan=plan), log_level="INFO", **changes)
    try:
        runner.train()
        assert all("PlannedMemory" not in str(call) for call in runner.hook_calls["after_train_iter"])
        log = Path(runner.log_dir, f"{runner.timestamp}.log")
        return [line for line in log.read_text().splitlines() if "plan" in line] if runner.rank == 0 else []
    finally:
        runner.strategy.leave()


def plan_of(strategy: str, world_size: int, peaks: list[float]) -> dict[str, Any]:
    """What `flextrain plan --json` prints, with such peaks in bytes."""
    moments = [
        Moment("forward", "", "", int(peak), {"parameters": int(peak) // 4, "activations": int(peak) // 2})
        for peak in peaks
    ]
    ranks = [RankPlan(rank, {}, peak, {}, [peak]) for rank, peak in enumerate(moments)]
    planned = StrategyPlan("mine", "planned", options={"type": strategy}, axes={"data": world_size}, ranks=ranks)
    return TrainingPlan("train.py", world_size, 1, None, "2.15", [planned]).as_json()


def measured(line: str) -> float:
    """Bytes that a line says were measured."""
    found = re.search(r"([\d.,]+) MiB at the peak of updates", line)
    assert found is not None, line
    return float(found[1].replace(",", "")) * MIB


def seen(folder: Path, strategy: str, world_size: int, peaks: list[float], **changes: Any) -> list[str]:
    """The lines of a training beside 400 MiB that stay, so that the line's digits tell a thousandth."""
    import torch

    held = torch.empty(400 * MIB, dtype=torch.uint8, device=f"npu:{os.environ['LOCAL_RANK']}")
    found = lines(folder, plan_of(strategy, world_size, peaks), strategy, world_size, **changes)
    del held
    return found


def test_a_difference_of_12_percent_warns_and_one_of_5_does_not(npu1: Any, tmp_path: Path) -> None:
    ((first,),) = npu1.run(seen, tmp_path, "NPUStrategy", 1, [1024 * MIB])
    assert "WARNING" in first
    assert "Memory differs from the plan by more than 10%" in first
    peak = measured(first)
    assert 400 * MIB < peak < 420 * MIB
    said = {}
    for difference in (-0.12, -0.05, 0.05, 0.12):
        ((said[difference],),) = npu1.run(seen, tmp_path, "NPUStrategy", 1, [peak / (1 + difference)])
        assert f"({difference:+.1%})" in said[difference]
        assert "most of it activations" in said[difference]
    assert ["WARNING" in line for line in said.values()] == [True, False, False, True]
    assert "Memory is as planned" in said[0.05]


def test_setting_up_and_validating_do_not_count(npu1: Any, tmp_path: Path) -> None:
    ((first,),) = npu1.run(seen, tmp_path, "NPUStrategy", 1, [MIB])
    ((second,),) = npu1.run(with_ballast, tmp_path, [MIB])
    assert measured(first) == measured(second)


def with_ballast(folder: Path, peaks: list[float]) -> list[str]:
    """The same if 100 MiB were allocated for a while before the training, and between its updates."""
    import torch

    from flextrain import Hook

    class Ballast(Hook):
        priority = "LOWEST"

        def before_run(self, runner: Any) -> None:
            torch.empty(100 * MIB, dtype=torch.uint8, device="npu")

        def after_train_iter(self, runner: Any, *args: Any, **kwargs: Any) -> None:
            torch.empty(100 * MIB, dtype=torch.uint8, device="npu")

    return seen(folder, "NPUStrategy", 1, peaks, custom_hooks=[Ballast()])


def test_the_line_is_of_the_rank_that_differs_most(npu2: Any, tmp_path: Path) -> None:
    (first,), _ = npu2.run(seen, tmp_path, "NPUStrategy", 2, [1024 * MIB] * 2)
    peak = measured(first)
    (line,), others = npu2.run(seen, tmp_path, "NPUStrategy", 2, [peak, peak / 1.3])
    assert others == []
    assert "on rank 1, which differs most" in line
    assert "(+30" in line


@pytest.mark.parametrize(("iters", "says"), [(2, "training ended before update 3"), (4, "peak of updates 3 to 4")])
def test_a_training_that_is_short(npu1: Any, tmp_path: Path, iters: int, says: str) -> None:
    short = dict(by_epoch=False, max_iters=iters)
    ((line,),) = npu1.run(seen, tmp_path, "NPUStrategy", 1, [MIB], train_cfg=short)
    assert says in line
