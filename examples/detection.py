"""Train a small detector on pictures with any number of boxes each, and measure its average precision.

    python examples/detection.py
    torchrun --nproc-per-node 2 examples/detection.py --strategy fsdp
    torchrun --nproc-per-node 2 examples/detection.py --strategy zero2

The pictures are drawn when they are read: nothing is downloaded. The detector finds the centres of objects on a coarse grid, and
the sizes of their boxes, as in "Objects as Points" (https://arxiv.org/abs/1904.07850).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from flextrain import BaseMetric, BaseModel, FlexibleRunner

CLASSES = ("filled", "hollow")
SIZE, STRIDE = 32, 4
GRID = SIZE // STRIDE

Target = dict[str, Tensor]
"""``boxes``: (number, 4) float32, x0 y0 x1 y1 in pixels; ``labels``: (number,) int64. The number may be 0."""


class Rectangles(Dataset[tuple[Tensor, Target]]):
    """Grey pictures, (1, 32, 32), with up to three rectangles on noise. A picture depends on its index alone."""

    def __init__(self, length: int, first: int = 0) -> None:
        self.length, self.first = length, first

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Target]:
        generator = torch.Generator().manual_seed(self.first + index)

        def draw(low: int, high: int, count: int = 1) -> list[int]:
            return torch.randint(low, high, (count,), generator=generator).tolist()

        image = 0.3 * torch.rand(1, SIZE, SIZE, generator=generator)
        boxes, labels = [], []
        # Each in a quarter of the picture of its own.
        for quarter in torch.randperm(4, generator=generator)[: draw(0, 4)[0]].tolist():
            width, height = draw(6, 14, 2)
            x, y = draw(0, 16 - width + 1)[0] + quarter % 2 * 16, draw(0, 16 - height + 1)[0] + quarter // 2 * 16
            (label,) = draw(0, len(CLASSES))
            image[:, y : y + height, x : x + width] = 1
            if CLASSES[label] == "hollow":
                image[:, y + 2 : y + height - 2, x + 2 : x + width - 2] = 0
            boxes.append([x, y, x + width, y + height])
            labels.append(label)
        return image, {
            "boxes": torch.tensor(boxes, dtype=torch.float32).view(-1, 4),
            "labels": torch.tensor(labels, dtype=torch.int64),
        }


def collate(samples: Sequence[tuple[Tensor, Target]]) -> tuple[Tensor, list[Target]]:
    """Stack the pictures. Targets stay a list, because they have different sizes."""
    images, targets = zip(*samples, strict=True)
    return torch.stack(images), list(targets)


class Detector(BaseModel):
    """For each cell of a grid: how likely each class has a centre there, and a box around it."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1),
            nn.ReLU(),
        )
        self.head = nn.Conv2d(2 * width, len(CLASSES) + 4, 3, padding=1)

    def forward(self, images: Tensor, targets: list[Target], mode: str = "tensor") -> Any:
        found = self.head(self.backbone(images)).float()
        logits, sides = found[:, : len(CLASSES)], found[:, len(CLASSES) :]
        if mode == "loss":
            return self.losses(logits - 2, sides, targets)  # few cells have a centre
        if mode == "predict":
            return self.boxes(logits - 2, sides)
        return logits, sides

    def loss_weight(self, data: tuple[Tensor, list[Target]]) -> int:
        """The number of pictures: the losses are means over these, however many boxes each has."""
        return len(data[1])

    def losses(self, logits: Tensor, sides: Tensor, targets: list[Target]) -> dict[str, Tensor]:
        heat, expected, has_box = torch.zeros_like(logits), torch.zeros_like(sides), torch.zeros_like(sides[:, :1])
        for number, target in enumerate(targets):
            boxes = target["boxes"]
            column, row = ((boxes[:, :2] + boxes[:, 2:]) / 2 / STRIDE).long().clamp(max=GRID - 1).unbind(1)
            heat[number, target["labels"], row, column] = 1
            has_box[number, :, row, column] = 1
            x, y = (column + 0.5) * STRIDE, (row + 0.5) * STRIDE
            distances = torch.stack([x - boxes[:, 0], y - boxes[:, 1], boxes[:, 2] - x, boxes[:, 3] - y])
            expected[number, :, row, column] = distances / STRIDE
        # Focal loss: cells that are clear already count little, https://arxiv.org/abs/1708.02002
        cross_entropy = F.binary_cross_entropy_with_logits(logits, heat, reduction="none")
        loss_heat = (cross_entropy * (1 - torch.exp(-cross_entropy)) ** 2).sum()
        loss_box = (F.smooth_l1_loss(sides, expected, reduction="none") * has_box).sum()
        return {"loss_heat": loss_heat / len(targets), "loss_box": loss_box / len(targets)}

    def boxes(self, logits: Tensor, sides: Tensor, threshold: float = 0.1) -> list[Target]:
        """For each picture, the cells above the threshold whose neighbours are less likely."""
        scores = logits.sigmoid()
        peaks = (scores == F.max_pool2d(scores, 3, stride=1, padding=1)) & (scores > threshold)
        found = []
        for score, peak, side in zip(scores, peaks, sides, strict=True):
            label, row, column = peak.nonzero(as_tuple=True)
            centre = torch.stack([column, row], 1).float().add(0.5).repeat(1, 2)
            distances = side[:, row, column].T * side.new_tensor([-1, -1, 1, 1])
            found.append(
                {
                    "boxes": STRIDE * (centre + distances),
                    "labels": label,
                    "scores": score[label, row, column],
                }
            )
        return found


class DetectionMetric(BaseMetric):
    """Mean over classes of the average precision at an overlap of 0.5, and the mean overlap of the boxes that count.

    ``process`` stores what a picture needs, on the CPU; ``compute_metrics`` gets the pictures of all processes. Precision is a
    property of all of them together: a mean of the processes' values would be another number.
    """

    def process(self, data_batch: tuple[Tensor, list[Target]], data_samples: list[Target]) -> None:
        for found, target in zip(data_samples, data_batch[1], strict=True):
            parts = ({name: tensor.cpu() for name, tensor in part.items()} for part in (found, target))
            self.results.append(tuple(parts))

    def compute_metrics(self, results: list[tuple[Target, Target]]) -> dict[str, float]:
        overlaps: list[float] = []
        precisions = [average_precision(results, label, overlaps) for label in range(len(CLASSES))]
        return {
            "ap50": 100 * sum(precisions) / len(precisions),
            "mean_iou": 100 * sum(overlaps) / max(len(overlaps), 1),
        }


def average_precision(results: list[tuple[Target, Target]], label: int, overlaps: list[float]) -> float:
    """Area under the curve of precision over recall, for one class; ``overlaps`` gets those of correct boxes."""
    guesses, total = [], 0
    for number, (found, target) in enumerate(results):
        chosen = found["labels"] == label
        scores = found["scores"][chosen].tolist()
        guesses += [(score, number, box) for score, box in zip(scores, found["boxes"][chosen], strict=True)]
        total += int((target["labels"] == label).sum())
    guesses.sort(key=lambda guess: (-guess[0], guess[1]))
    taken: set[tuple[int, int]] = set()
    area, correct = 0.0, 0
    for rank, (_, number, box) in enumerate(guesses, 1):
        target = results[number][1]
        overlap = iou(box, target["boxes"]) * (target["labels"] == label)
        best = int(overlap.argmax()) if len(overlap) else -1
        if best >= 0 and overlap[best] >= 0.5 and (number, best) not in taken:
            taken.add((number, best))
            overlaps.append(float(overlap[best]))
            correct += 1
            area += correct / rank
    return area / max(total, 1)


def iou(box: Tensor, others: Tensor) -> Tensor:
    """The overlap of a box with each of the others: (number,)."""
    inside = (torch.minimum(box[2:], others[:, 2:]) - torch.maximum(box[:2], others[:, :2])).clamp(min=0).prod(1)
    areas = (box[2:] - box[:2]).clamp(min=0).prod() + (others[:, 2:] - others[:, :2]).prod(1)
    return inside / (areas - inside)


def dataloader(dataset: Dataset[Any], batch_size: int, shuffle: bool) -> dict[str, Any]:
    return dict(
        batch_size=batch_size,
        dataset=dataset,
        sampler=dict(type="DefaultSampler", shuffle=shuffle),
        collate_fn=collate,
    )


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategy", help="fsdp, zero2, zero3 and so on; default: one device or DDP")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--pictures", type=int, default=1600, help="in each epoch")
    parser.add_argument("--batch-size", type=int, default=32, help="per process")
    parser.add_argument("--accumulate", type=int, default=1, help="batches per update")
    parser.add_argument("--width", type=int, default=32, help="channels of the first layer")
    parser.add_argument("--work-dir", default="work_dirs/detection")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in --work-dir")
    return parser.parse_args(arguments)


def make_runner(arguments: argparse.Namespace) -> FlexibleRunner:
    return FlexibleRunner(
        model=lambda: Detector(arguments.width),
        work_dir=arguments.work_dir,
        strategy=arguments.strategy,
        train_dataloader=dataloader(Rectangles(arguments.pictures), arguments.batch_size, shuffle=True),
        optim_wrapper=dict(
            optimizer=dict(type="AdamW", lr=2e-3),
            clip_grad=dict(max_norm=10.0),
            accumulative_counts=arguments.accumulate,
        ),
        param_scheduler=dict(type="CosineAnnealingLR", T_max=arguments.epochs, convert_to_iter_based=True),
        train_cfg=dict(by_epoch=True, max_epochs=arguments.epochs),
        val_dataloader=dataloader(Rectangles(200, first=1_000_000), arguments.batch_size, shuffle=False),
        val_cfg=dict(),
        val_evaluator=dict(type=DetectionMetric),
        default_hooks=dict(checkpoint=dict(type="CheckpointHook", interval=1, max_keep_ckpts=2, overwrite=True)),
        randomness=dict(seed=0),
        resume=arguments.resume,
    )


if __name__ == "__main__":
    make_runner(parse_arguments()).train()
