"""examples/detection.py: targets of different sizes, and a metric of all processes' pictures, equal under every strategy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flextrain.testing import WorkerGroup
from flextrain.testing.loop import alone

from .recipes import make, means, recipe, same, trained

SIZE = ("--epochs", "8", "--pictures", "64", "--width", "8", "--accumulate", "2")
STRATEGIES = [
    "ddp",
    pytest.param("fsdp", marks=pytest.mark.full),
    pytest.param("zero2", marks=[pytest.mark.full, pytest.mark.deepspeed]),
    pytest.param("zero3", marks=[pytest.mark.full, pytest.mark.deepspeed]),
]


@pytest.mark.distributed
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_processes_train_as_one_device(tmp_path: Path, workers2: WorkerGroup, strategy: str) -> None:
    with alone():
        expected = trained("detection", tmp_path / "alone", (*SIZE, "--batch-size", "4"))
    assert expected["metrics"][-1]["ap50"] > 1, "otherwise the metrics would say nothing"
    flags = (*SIZE, "--batch-size", "2", "--strategy", strategy)
    both = workers2.run(trained, "detection", tmp_path / "both", flags)
    assert means(both) == pytest.approx(expected["losses"], rel=1e-5)
    assert len({len(one["losses"]) for one in both} | {len(expected["losses"])}) == 1
    for found in both:
        same(found, expected)
        for mine, theirs in zip(found["metrics"], expected["metrics"], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5)


@pytest.mark.full
@pytest.mark.distributed
def test_a_run_goes_on_with_another_number_of_processes(tmp_path: Path, workers2: WorkerGroup) -> None:
    size = ("--epochs", "2", "--pictures", "32", "--width", "4")
    with alone():
        expected = trained("detection", tmp_path / "whole", (*size, "--batch-size", "8"))
        first = trained("detection", tmp_path / "run", (*size, "--batch-size", "8"), stop=3)
    flags = (*size, "--batch-size", "4", "--strategy", "fsdp", "--resume")
    both = workers2.run(trained, "detection", tmp_path / "run", flags)
    assert first["losses"] + means(both) == pytest.approx(expected["losses"], rel=1e-5)
    for found in both:
        same(found, {**expected, "metrics": found["metrics"]})


def test_pictures_have_any_number_of_boxes() -> None:
    detection = recipe("detection")
    images, targets = detection.collate([detection.Rectangles(40)[index] for index in range(40)])
    assert images.shape == (40, 1, 32, 32)
    assert {len(target["boxes"]) for target in targets} == {0, 1, 2, 3}
    for target in targets:
        assert target["boxes"].shape == (len(target["labels"]), 4)
        assert ((target["boxes"] >= 0) & (target["boxes"] <= 32)).all()


def test_the_metric() -> None:
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
def test_it_learns(tmp_path: Path) -> None:
    with alone():
        runner = make("detection", tmp_path, ("--epochs", "3", "--pictures", "800"))
        runner.train()
        assert runner.val()["ap50"] > 60
