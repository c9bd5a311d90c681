"""Recipes of examples/: trained under every strategy as by one device, gone on with by another number of processes, and learning."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from flextrain.core.checkpoint import Checkpoint, FlatShard
from flextrain.testing import WorkerGroup
from flextrain.testing.loop import alone

from .recipes import make, means, recipe, same, trained

FULL, DEEPSPEED = pytest.mark.full, pytest.mark.deepspeed


@dataclass(frozen=True)
class Recipe:
    """How a recipe is trained at tiny size, and how near to one device the processes come.

    Attributes:
        size: flags of every run.
        batch: samples of a batch of one device; each of two processes has half of them.
        package: what it needs.
        short: the strategy that is tried in make test; all others in make test-full.
        strategies: all of them.
        losses, weights, metrics: relative differences that are allowed, absolute ones too of the weights.
        frozen: prefixes of the weights that no optimizer has.
    """

    size: tuple[str, ...]
    batch: int
    package: str
    short: str
    strategies: tuple[str, ...]
    losses: float
    weights: float
    metrics: float
    frozen: tuple[str, ...] = ()


RECIPES = {
    "detection": Recipe(
        ("--epochs", "8", "--pictures", "64", "--width", "8", "--accumulate", "2"),
        4,
        "torch",
        "ddp",
        ("ddp", "fsdp", "zero2", "zero3"),
        1e-5,
        1e-5,
        1e-5,
    ),
    "momentum_teacher": Recipe(
        ("--epochs", "1", "--width", "4", "--accumulate", "2", "--momentum", "0.2"),
        64,
        "sklearn",
        "fsdp",
        ("ddp", "fsdp", "zero1", "zero2", "zero3"),
        1e-4,
        2e-5,
        0.02,
        ("teacher.",),
    ),
    "preferences": Recipe(
        ("--max-iters", "4", "--layers", "1"),
        8,
        "transformers",
        "fsdp",
        ("ddp", "fsdp", "zero2", "zero3", "mesh:tp=2"),
        1e-5,
        1e-5,
        1e-3,
        ("reference.",),
    ),
    # A phase of two updates; the second hard one begins at update 6, and resuming at 7 is in its middle.
    "own_loop": Recipe(
        ("--max-iters", "10", "--phase", "2", "--threshold", "2.5"),
        32,
        "sklearn",
        "fsdp",
        ("ddp", "fsdp", "zero2", "zero3"),
        1e-4,
        2e-5,
        0,
    ),
}


def marked(*values: Any, strategy: str, is_short: bool) -> Any:
    """A combination; those with DeepSpeed, and all but the short ones, have markers."""
    marks = [] if is_short else [FULL]
    return pytest.param(*values, marks=[*marks, DEEPSPEED] if strategy.startswith("zero") else marks)


def flags_of(name: str, strategy: str | None, *more: str) -> tuple[str, ...]:
    """The flags of one device, or of each of two processes under a strategy."""
    each = RECIPES[name].batch // (1 if strategy is None or strategy.startswith("mesh") else 2)
    under = () if strategy is None else ("--strategy", strategy)
    return (*RECIPES[name].size, "--batch-size", str(each), *under, *more)


def check(name: str, found: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """Every process ends with the weights, the metrics and the optimized names of one device."""
    of = RECIPES[name]
    for one in found:
        same(one, expected, of.weights)
        assert one["metrics"][-1] == pytest.approx(expected["metrics"][-1], rel=of.metrics, abs=of.metrics / 10)
        assert not any(key.startswith(of.frozen) for key in one["optimized"])


def detects(expected: dict[str, Any]) -> None:
    assert expected["metrics"][-1]["ap50"] > 1, "otherwise the metrics would say nothing"


def follows(expected: dict[str, Any]) -> None:
    weights = expected["weights"]
    assert not torch.equal(weights["teacher.encoder.0.weight"], weights["student.encoder.0.weight"])


def prefers(expected: dict[str, Any]) -> None:
    assert expected["losses"][0] == pytest.approx(math.log(2)), "the reference is the policy at first"
    assert expected["losses"][-1] != pytest.approx(math.log(2), abs=1e-4)
    weights = expected["weights"]
    before = {name: tensor for name, tensor in weights.items() if name.startswith("reference.")}
    moved = [name for name, tensor in before.items() if not torch.equal(tensor, weights[f"policy.{name[10:]}"])]
    assert moved, "the policy has learnt, and the reference has not followed"


AS_IT_SHOULD: dict[str, Callable[[dict[str, Any]], None]] = {
    "detection": detects,
    "momentum_teacher": follows,
    "preferences": prefers,
}
"""What is so of the training on one device, without which comparing with it would say nothing."""


@pytest.mark.distributed
@pytest.mark.parametrize(
    "name, strategy",
    [
        marked(name, strategy, strategy=strategy, is_short=strategy == RECIPES[name].short)
        for name in AS_IT_SHOULD
        for strategy in RECIPES[name].strategies
    ],
)
def test_two_processes_train_as_one_device(tmp_path: Path, workers2: WorkerGroup, name: str, strategy: str) -> None:
    pytest.importorskip(RECIPES[name].package)
    with alone():
        expected = trained(name, tmp_path / "alone", flags_of(name, None))
    AS_IT_SHOULD[name](expected)
    more = ("--exclude-reference",) if name == "preferences" else ()
    both = workers2.run(trained, name, tmp_path / "both", flags_of(name, strategy, *more))
    assert means(both) == pytest.approx(expected["losses"], rel=RECIPES[name].losses)
    assert {len(one["losses"]) for one in both} == {len(expected["losses"])}
    check(name, both, expected)
    if name == "detection":
        for found in both:
            for mine, theirs in zip(found["metrics"], expected["metrics"], strict=True):
                assert mine == pytest.approx(theirs, rel=1e-5)
    if name == "preferences":
        assert parameters(tmp_path / "alone" / "iter_4", "model.reference."), "kept if nothing else is said"
        assert not parameters(tmp_path / "both" / "iter_4", "model.reference.")
        assert parameters(tmp_path / "both" / "iter_4", "model.policy.")


def parameters(checkpoint: Path, prefix: str) -> set[str]:
    return {key for key in Checkpoint.open(checkpoint).entries if key.startswith(prefix)}


GOES_ON = {
    "momentum_teacher": (5, (), ("ddp", "fsdp", "zero3")),
    "own_loop": (7, ("--accumulate", "2"), RECIPES["own_loop"].strategies),
    "preferences": (2, ("--exclude-reference", "--accumulate", "2"), ("ddp", "fsdp", "zero3")),
}
"""The update after which a run of two processes ends, further flags, and the strategies."""


@pytest.mark.distributed
@pytest.mark.parametrize(
    "name, strategy",
    [
        marked(name, strategy, strategy=strategy, is_short=(name, strategy) == ("own_loop", "fsdp"))
        for name, (_, _, strategies) in GOES_ON.items()
        for strategy in strategies
    ],
)
def test_a_run_of_two_processes_goes_on_on_one_device(
    tmp_path: Path, workers2: WorkerGroup, name: str, strategy: str
) -> None:
    """As if one device had trained all the time; a reference that the checkpoint leaves out is that of the seed."""
    pytest.importorskip(RECIPES[name].package)
    stop, more, _ = GOES_ON[name]
    with alone():
        expected = trained(name, tmp_path / "whole", flags_of(name, None, *more))
    first = workers2.run(trained, name, tmp_path / "run", flags_of(name, strategy, *more), stop)
    with alone():
        rest = trained(name, tmp_path / "run", flags_of(name, None, *more, "--resume"))
    assert means(first) + rest["losses"] == pytest.approx(expected["losses"], rel=RECIPES[name].losses)
    check(name, [rest], expected)
    if name == "own_loop":
        assert rest["metrics"] == expected["metrics"]
        ends = [tmp_path / folder for folder in ("run/iter_7", "run/iter_10", "whole/iter_10")]
        assert [int(Checkpoint.open(end).values["loop"]["level"]) for end in ends] == [2, 3, 3]


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.parametrize("name, size, stop", [("detection", 8, 3), ("own_loop", 32, 4)])
def test_one_device_goes_on_on_two(tmp_path: Path, workers2: WorkerGroup, name: str, size: int, stop: int) -> None:
    pytest.importorskip(RECIPES[name].package)
    own = ("--epochs", "2", "--pictures", "32", "--width", "4") if name == "detection" else RECIPES[name].size
    with alone():
        expected = trained(name, tmp_path / "whole", (*own, "--batch-size", str(size)))
        first = trained(name, tmp_path / "run", (*own, "--batch-size", str(size)), stop=stop)
    flags = (*own, "--batch-size", str(size // 2), "--strategy", "fsdp", "--resume")
    both = workers2.run(trained, name, tmp_path / "run", flags)
    assert first["losses"] + means(both) == pytest.approx(expected["losses"], rel=RECIPES[name].losses)
    for found in both:
        metrics = found["metrics"] if name == "detection" else expected["metrics"]
        same(found, {**expected, "metrics": metrics}, RECIPES[name].weights)


@pytest.mark.full
@pytest.mark.parametrize(
    "name, flags, metric, least",
    [
        ("detection", ("--epochs", "3", "--pictures", "800"), "ap50", 60),
        # Features still tell the digits apart: if all became alike, the loss would fall too.
        ("momentum_teacher", ("--epochs", "10", "--width", "8"), "neighbour_accuracy", 75),
        ("own_loop", ("--max-iters", "120"), "accuracy", 90),
        ("preferences", ("--max-iters", "150"), "accuracy", 80),
    ],
)
def test_it_learns(tmp_path: Path, name: str, flags: tuple[str, ...], metric: str, least: float) -> None:
    pytest.importorskip(RECIPES[name].package)
    with alone():
        found = trained(name, tmp_path, flags)
    if name == "momentum_teacher":
        assert sum(found["losses"][-20:]) < 0.5 * sum(found["losses"][:20])
    assert found["metrics"][-1][metric] > least


# What one of them does besides


def test_pictures_have_any_number_of_boxes() -> None:
    detection = recipe("detection")
    images, targets = detection.collate([detection.Rectangles(40)[index] for index in range(40)])
    assert images.shape == (40, 1, 32, 32)
    assert {len(target["boxes"]) for target in targets} == {0, 1, 2, 3}
    for target in targets:
        assert target["boxes"].shape == (len(target["labels"]), 4)
        assert ((target["boxes"] >= 0) & (target["boxes"] <= 32)).all()


def test_the_metric_of_detection() -> None:
    detection = recipe("detection")
    box, other = torch.tensor([[0.0, 0, 8, 8]]), torch.tensor([[16.0, 16, 24, 24]])

    def found(boxes: torch.Tensor, labels: list[int], scores: list[float]) -> dict[str, torch.Tensor]:
        return {"boxes": boxes, "labels": torch.tensor(labels), "scores": torch.tensor(scores)}

    def target(boxes: torch.Tensor, labels: list[int]) -> dict[str, torch.Tensor]:
        return {"boxes": boxes, "labels": torch.tensor(labels, dtype=torch.int64)}

    metric = detection.DetectionMetric()
    both = torch.cat([box, other])
    right = (found(both, [0, 1], [0.9, 0.8]), target(both, [0, 1]))
    assert metric.compute_metrics([right]) == {"ap50": 100, "mean_iou": 100}
    # A surer box of class 0 in a picture without any halves its precision; that of class 1 stays.
    wrong = (found(box, [0], [0.95]), target(box[:0], []))
    assert metric.compute_metrics([right, wrong]) == {"ap50": 75, "mean_iou": 100}
    # Found twice counts once, and a box of the other class does not count.
    twice = (found(torch.cat([box, box + 1]), [0, 0], [0.9, 0.8]), target(box, [0]))
    assert metric.compute_metrics([twice]) == {"ap50": 50, "mean_iou": 100}
    assert metric.compute_metrics([(found(box, [1], [0.9]), target(box, [0]))]) == {"ap50": 0, "mean_iou": 0}


@pytest.mark.full
def test_an_evaluation_before_training_changes_nothing(tmp_path: Path) -> None:
    weights = []
    with alone():
        for number, evaluates in enumerate((True, False)):
            runner = make("momentum_teacher", tmp_path / str(number), RECIPES["momentum_teacher"].size)
            if evaluates:
                runner.val()
            runner.train()
            weights.append({name: t.clone() for name, t in runner.strategy.model_state().items()})
    first, second = weights
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


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
    pytest.importorskip("transformers")
    for found in workers2.run(shards, tmp_path, strategy):
        assert len(found) == 21
        assert all(2 * here == whole for here, whole in found)
