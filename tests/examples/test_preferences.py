"""examples/preferences.py: two forwards per update, and a reference that is frozen, sharded, in no optimizer and, if asked, in no
checkpoint."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from flextrain.core.checkpoint import Checkpoint, FlatShard
from flextrain.testing import WorkerGroup
from flextrain.testing.loop import alone

from .recipes import make, means, same, trained

pytest.importorskip("transformers")

SIZE = ("--max-iters", "4", "--layers", "1")
ZERO = [pytest.mark.full, pytest.mark.deepspeed]
STRATEGIES = [
    pytest.param("ddp", marks=pytest.mark.full),
    "fsdp",
    pytest.param("zero2", marks=ZERO),
    pytest.param("zero3", marks=ZERO),
    pytest.param("mesh:tp=2", marks=pytest.mark.full),
]


def parameters(checkpoint: Path, prefix: str) -> set[str]:
    return {key for key in Checkpoint.open(checkpoint).entries if key.startswith(prefix)}


def check(found: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    for one in found:
        same(one, expected)
        assert one["metrics"][-1] == pytest.approx(expected["metrics"][-1], rel=1e-3, abs=1e-4)
        assert not any(name.startswith("reference.") for name in one["optimized"])


@pytest.mark.distributed
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_processes_train_as_one_device(tmp_path: Path, workers2: WorkerGroup, strategy: str) -> None:
    with alone():
        expected = trained("preferences", tmp_path / "alone", (*SIZE, "--batch-size", "8"))
    assert expected["losses"][0] == pytest.approx(math.log(2)), "the reference is the policy at first"
    assert expected["losses"][-1] != pytest.approx(math.log(2), abs=1e-4)
    weights = expected["weights"]
    before = {name: tensor for name, tensor in weights.items() if name.startswith("reference.")}
    moved = [name for name, tensor in before.items() if not torch.equal(tensor, weights[f"policy.{name[10:]}"])]
    assert moved, "the policy has learnt, and the reference has not followed"
    batch = "8" if strategy.startswith("mesh") else "4"
    flags = (*SIZE, "--batch-size", batch, "--strategy", strategy, "--exclude-reference")
    both = workers2.run(trained, "preferences", tmp_path / "both", flags)
    assert means(both) == pytest.approx(expected["losses"], rel=1e-5)
    check(both, expected)
    assert parameters(tmp_path / "alone" / "iter_4", "model.reference."), "kept if nothing else is said"
    assert not parameters(tmp_path / "both" / "iter_4", "model.reference.")
    assert parameters(tmp_path / "both" / "iter_4", "model.policy.")


def shards(folder: Path, strategy: str) -> list[tuple[int, int]]:
    """Elements of each parameter of the reference here, and in all, after two updates."""
    runner = make("preferences", folder, ("--max-iters", "2", "--batch-size", "2", "--strategy", strategy))
    runner.train()
    found = [
        (tensor.to_local().numel() if isinstance(tensor, (DTensor, FlatShard)) else tensor.numel(), tensor.numel())
        for name, tensor in runner.strategy.model_state().items()
        if name.startswith("reference.")
    ]
    runner.strategy.leave()
    return found


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("zero3", marks=pytest.mark.deepspeed)])
def test_the_reference_is_sharded(tmp_path: Path, workers2: WorkerGroup, strategy: str) -> None:
    for found in workers2.run(shards, tmp_path, strategy):
        assert len(found) == 21
        assert all(2 * here == whole for here, whole in found)


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", pytest.param("zero3", marks=pytest.mark.deepspeed)])
def test_a_run_without_the_reference_goes_on(tmp_path: Path, workers2: WorkerGroup, strategy: str) -> None:
    """On one device, from a checkpoint of two processes, with a reference that the seed gives."""
    flags = (*SIZE, "--exclude-reference", "--accumulate", "2")
    with alone():
        expected = trained("preferences", tmp_path / "whole", (*flags, "--batch-size", "8"))
    first = workers2.run(
        trained, "preferences", tmp_path / "run", (*flags, "--batch-size", "4", "--strategy", strategy), 2
    )
    with alone():
        rest = trained("preferences", tmp_path / "run", (*flags, "--batch-size", "8", "--resume"))
    assert means(first) + rest["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    check([rest], expected)


@pytest.mark.full
def test_it_learns(tmp_path: Path) -> None:
    with alone():
        runner = make("preferences", tmp_path, ("--max-iters", "150"))
        runner.train()
        assert runner.val()["accuracy"] > 80
