"""examples/grpo.py: the same rewards on one device, under FSDP and under tensor parallelism, and they rise."""

from __future__ import annotations

import pytest

from flextrain.testing import WorkerGroup
from flextrain.testing.loop import alone

from .recipes import recipe

SMALL = ("--steps", "5", "--problems", "4", "--group", "8", "--width", "16", "--lr", "0.03")


def rewards(*flags: str) -> list[float]:
    found: list[float] = recipe("grpo").main(flags)
    return found


@pytest.mark.distributed
def test_rewards_do_not_depend_on_the_strategy(workers2: WorkerGroup) -> None:
    pytest.importorskip("transformers")
    with alone():
        expected, without = rewards(*SMALL), rewards(*SMALL, "--lr", "0")
    assert expected[0] == without[0]
    assert expected[1:] != without[1:], "otherwise they would say nothing of the updates"
    for strategy in ("fsdp", "mesh:tp=2"):
        for found in workers2.run(rewards, *SMALL, "--strategy", strategy):
            assert found == pytest.approx(expected, rel=1e-12), strategy


@pytest.mark.full
def test_rewards_rise() -> None:
    pytest.importorskip("transformers")
    found = rewards("--steps", "60")
    assert found[0] < 0.2
    assert sum(found[-10:]) / 10 > 0.4
