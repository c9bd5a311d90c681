"""examples/own_loop.py: a loop of one's own counts, logs, saves, resumes and is elastic as ours are."""

from __future__ import annotations

from pathlib import Path

import pytest

from flextrain.core.checkpoint import Checkpoint
from flextrain.testing import WorkerGroup
from flextrain.testing.loop import alone

from .recipes import make, means, same, trained

pytest.importorskip("sklearn")

# A phase of two updates; the second hard one begins at update 6, and resuming at 7 is in its middle.
SIZE = ("--max-iters", "10", "--phase", "2", "--threshold", "2.5")
ZERO = [pytest.mark.full, pytest.mark.deepspeed]
STRATEGIES = [
    pytest.param("ddp", marks=pytest.mark.full),
    "fsdp",
    pytest.param("zero2", marks=ZERO),
    pytest.param("zero3", marks=ZERO),
]


def level(checkpoint: Path) -> int:
    return int(Checkpoint.open(checkpoint).values["loop"]["level"])


@pytest.mark.distributed
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_it_goes_on_on_another_number_of_processes(tmp_path: Path, workers2: WorkerGroup, strategy: str) -> None:
    """On two processes to the middle of a phase, then on one device, is as if one device had trained all the time."""
    flags = (*SIZE, "--accumulate", "2")
    with alone():
        expected = trained("own_loop", tmp_path / "whole", (*flags, "--batch-size", "32"))
    first = workers2.run(
        trained, "own_loop", tmp_path / "run", (*flags, "--batch-size", "16", "--strategy", strategy), 7
    )
    assert level(tmp_path / "run" / "iter_7") == 2
    with alone():
        rest = trained("own_loop", tmp_path / "run", (*flags, "--batch-size", "32", "--resume"))
    assert level(tmp_path / "run" / "iter_10") == level(tmp_path / "whole" / "iter_10") == 3
    assert means(first) + rest["losses"] == pytest.approx(expected["losses"], rel=1e-4)
    same(rest, expected, tolerance=2e-5)
    assert rest["metrics"] == expected["metrics"]


@pytest.mark.full
@pytest.mark.distributed
def test_one_device_goes_on_on_two(tmp_path: Path, workers2: WorkerGroup) -> None:
    with alone():
        expected = trained("own_loop", tmp_path / "whole", (*SIZE, "--batch-size", "32"))
        first = trained("own_loop", tmp_path / "run", (*SIZE, "--batch-size", "32"), stop=4)
    flags = (*SIZE, "--batch-size", "16", "--strategy", "fsdp", "--resume")
    rest = workers2.run(trained, "own_loop", tmp_path / "run", flags)
    assert first["losses"] + means(rest) == pytest.approx(expected["losses"], rel=1e-4)
    for found in rest:
        same(found, expected, tolerance=2e-5)


@pytest.mark.full
def test_it_learns(tmp_path: Path) -> None:
    with alone():
        runner = make("own_loop", tmp_path, ("--max-iters", "120"))
        runner.train()
        assert runner.val()["accuracy"] > 90
        assert runner.train_loop.level > 1
