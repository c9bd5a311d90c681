"""examples/grpo.py: the same rewards on one device, under FSDP and under tensor parallelism, and they rise."""

from __future__ import annotations

import functools

import pytest

from flextrain.testing import WorkerGroup
from flextrain.testing.loop import alone

from .recipes import recipe

SMALL = ("--steps", "5", "--problems", "4", "--group", "8", "--width", "16", "--lr", "0.03")


def rewards(*flags: str) -> list[float]:
    found: list[float] = recipe("grpo").main(flags)
    return found


@functools.cache
def on_one_device() -> list[float]:
    with alone():
        return rewards(*SMALL)


def test_updates_change_rewards() -> None:
    pytest.importorskip("transformers")
    with alone():
        without = rewards(*SMALL, "--lr", "0")
    assert on_one_device()[0] == without[0], "of the first samples, before any update"
    assert on_one_device()[1:] != without[1:]


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.parametrize("strategy", ["fsdp", "mesh:tp=2", "ddp"])
def test_rewards_do_not_depend_on_the_strategy(workers2: WorkerGroup, strategy: str) -> None:
    pytest.importorskip("transformers")
    for found in workers2.run(rewards, *SMALL, "--strategy", strategy):
        assert found == pytest.approx(on_one_device(), rel=1e-12)


@pytest.mark.full
def test_rewards_rise() -> None:
    pytest.importorskip("transformers")
    with alone():
        found = rewards("--steps", "60")
    assert found[0] < 0.2
    assert sum(found[-10:]) / 10 > 0.4
