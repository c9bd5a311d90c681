"""Learn features without labels from a momentum teacher, the moving average of the network that is trained.

    python examples/momentum_teacher.py
    torchrun --nproc-per-node 2 examples/momentum_teacher.py --strategy fsdp
    torchrun --nproc-per-node 2 examples/momentum_teacher.py --strategy zero3

The student sees one distorted picture of a handwritten digit, and predicts the teacher's features of another one, as in BYOL
(https://arxiv.org/abs/2006.07733). Labels serve only to measure whether features
tell digits apart: if all features became alike, the loss would fall too.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from train_classifier import dataloader, digits

from flextrain import BaseMetric, BaseModel, FlexibleRunner


class Student(nn.Module):
    """From pictures, (samples, 1, 8, 8), to features, and from these to the space in which both networks are compared."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(2 * width * 16, 4 * width),
        )
        self.projector = nn.Sequential(nn.LayerNorm(4 * width), nn.ReLU(), nn.Linear(4 * width, 2 * width))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.encoder(images)
        return features, self.projector(features)


class SelfDistillation(BaseModel):
    """The teacher is a part of the model, so that it is sharded and saved; TeacherHook makes it follow the student."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.student = Student(width)
        self.predictor = nn.Sequential(nn.Linear(2 * width, 4 * width), nn.ReLU(), nn.Linear(4 * width, 2 * width))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, images: Tensor, labels: Tensor, mode: str = "tensor") -> Any:
        if mode != "loss":
            return self.teacher(images)[0], labels
        # A pass through each network for both pictures at once.
        first, second = distorted(images, 0), distorted(images, 1)
        predicted = self.predictor(self.student(torch.cat([first, second]))[1])
        with torch.no_grad():
            wanted = self.teacher(torch.cat([second, first]))[1]
        return {"loss": 2 - 2 * F.cosine_similarity(predicted, wanted).mean()}


def distorted(images: Tensor, view: int) -> Tensor:
    """Move each picture by up to a pixel, and hide a part of it.

    What is drawn depends on the picture alone and on which of its two views it is: so every strategy sees the same.
    """
    rows = torch.arange(images.shape[0], device=images.device)
    draws = (images.flatten(1).sum(1) * 7919 * (view + 1)).long()
    padded = F.pad(images, (1, 1, 1, 1))
    pixels = torch.arange(8, device=images.device)
    y, x = (draws % 3)[:, None] + pixels, (draws // 3 % 3)[:, None] + pixels
    moved = padded[rows[:, None, None], 0, y[:, :, None], x[:, None, :]].unsqueeze(1)
    hidden = (pixels // 2)[None] == (draws // 9 % 4)[:, None]
    return moved.masked_fill(hidden[:, None, :, None], 0.0)


class NeighbourAccuracy(BaseMetric):
    """Percentage of samples whose nearest other sample, by the angle between features, has the same label."""

    def process(self, data_batch: Any, data_samples: tuple[Tensor, Tensor]) -> None:
        features, labels = data_samples
        self.results += list(zip(F.normalize(features.float()).cpu(), labels.tolist(), strict=True))

    def compute_metrics(self, results: list[tuple[Tensor, int]]) -> dict[str, float]:
        features, labels = torch.stack([part for part, _ in results]), torch.tensor([label for _, label in results])
        likeness = (features @ features.T).fill_diagonal_(-1)
        return {"neighbour_accuracy": 100 * float((labels[likeness.argmax(1)] == labels).float().mean())}


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategy", help="ddp, fsdp, zero2, zero3 and so on; default: one device or DDP")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64, help="per process")
    parser.add_argument("--accumulate", type=int, default=1, help="batches per update")
    parser.add_argument("--width", type=int, default=32, help="channels of the first layer")
    parser.add_argument("--momentum", type=float, default=0.02, help="share of the newest weights in the teacher")
    parser.add_argument("--amp", action="store_true", help="compute in bfloat16 where it is safe")
    parser.add_argument("--work-dir", default="work_dirs/momentum_teacher")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in --work-dir")
    return parser.parse_args(arguments)


def make_runner(arguments: argparse.Namespace) -> FlexibleRunner:
    train_set, val_set = digits()
    return FlexibleRunner(
        model=lambda: SelfDistillation(arguments.width),
        work_dir=arguments.work_dir,
        strategy=arguments.strategy,
        train_dataloader=dataloader(train_set, arguments.batch_size, num_workers=0, shuffle=True),
        optim_wrapper=dict(
            type="AmpOptimWrapper" if arguments.amp else "OptimWrapper",
            **(dict(dtype="bfloat16") if arguments.amp else {}),
            optimizer=dict(type="AdamW", lr=1e-3),
            accumulative_counts=arguments.accumulate,
        ),
        train_cfg=dict(by_epoch=True, max_epochs=arguments.epochs),
        val_dataloader=dataloader(val_set, arguments.batch_size, num_workers=0, shuffle=False),
        val_cfg=dict(),
        val_evaluator=dict(type=NeighbourAccuracy),
        custom_hooks=[
            # Half a cosine from the given share to 0, as in BYOL: at the end the teacher rests.
            dict(
                type="TeacherHook", student="student", teacher="teacher", momentum=arguments.momentum, end_momentum=0.0
            )
        ],
        default_hooks=dict(checkpoint=dict(type="CheckpointHook", interval=5, max_keep_ckpts=2, overwrite=True)),
        randomness=dict(seed=0),
        resume=arguments.resume,
    )


if __name__ == "__main__":
    make_runner(parse_arguments()).train()
