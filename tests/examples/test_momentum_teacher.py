"""examples/momentum_teacher.py: the teacher is the moving average of the student, under every strategy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flextrain.testing import WorkerGroup
from flextrain.testing.loop import alone

from .recipes import make, means, same, trained

pytest.importorskip("sklearn")

SIZE = ("--epochs", "1", "--width", "4", "--accumulate", "2", "--momentum", "0.2")
ZERO = [pytest.mark.full, pytest.mark.deepspeed]
STRATEGIES = [
    pytest.param("ddp", marks=pytest.mark.full),
    "fsdp",
    pytest.param("zero1", marks=ZERO),
    pytest.param("zero2", marks=ZERO),
    pytest.param("zero3", marks=ZERO),
]


@pytest.mark.distributed
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_processes_train_as_one_device(tmp_path: Path, workers2: WorkerGroup, strategy: str) -> None:
    with alone():
        expected = trained("momentum_teacher", tmp_path / "alone", (*SIZE, "--batch-size", "64"))
    flags = (*SIZE, "--batch-size", "32", "--strategy", strategy)
    both = workers2.run(trained, "momentum_teacher", tmp_path / "both", flags)
    assert means(both) == pytest.approx(expected["losses"], rel=1e-4)
    weights = expected["weights"]
    assert not torch.equal(weights["teacher.encoder.0.weight"], weights["student.encoder.0.weight"])
    for found in both:
        same(found, expected, tolerance=2e-5)
        assert found["metrics"][-1] == pytest.approx(expected["metrics"][-1], rel=0.02)
        assert not any(name.startswith("teacher.") for name in found["optimized"])


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", pytest.param("zero3", marks=pytest.mark.deepspeed)])
def test_a_run_goes_on_on_one_device(tmp_path: Path, workers2: WorkerGroup, strategy: str) -> None:
    with alone():
        expected = trained("momentum_teacher", tmp_path / "whole", (*SIZE, "--batch-size", "64"))
    flags = (*SIZE, "--batch-size", "32", "--strategy", strategy)
    first = workers2.run(trained, "momentum_teacher", tmp_path / "run", flags, 5)
    with alone():
        rest = trained("momentum_teacher", tmp_path / "run", (*SIZE, "--batch-size", "64", "--resume"))
    assert means(first) + rest["losses"] == pytest.approx(expected["losses"], rel=1e-4)
    same(rest, expected, tolerance=2e-5)


@pytest.mark.full
def test_it_learns_without_collapse(tmp_path: Path) -> None:
    """The loss falls, and features still tell the digits apart: if all became alike, the loss would fall too."""
    with alone():
        found = trained("momentum_teacher", tmp_path, ("--epochs", "10", "--width", "8"))
    assert sum(found["losses"][-20:]) < 0.5 * sum(found["losses"][:20])
    assert found["metrics"][-1]["neighbour_accuracy"] > 75


@pytest.mark.full
def test_an_evaluation_before_training_changes_nothing(tmp_path: Path) -> None:
    weights = []
    with alone():
        for number, evaluates in enumerate((True, False)):
            runner = make("momentum_teacher", tmp_path / str(number), SIZE)
            if evaluates:
                runner.val()
            runner.train()
            weights.append({name: t.clone() for name, t in runner.strategy.model_state().items()})
    first, second = weights
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
