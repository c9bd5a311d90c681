"""Train a classifier of small pictures. Replace `pictures` by your data and `net` by your model."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from flextrain import BaseMetric, BaseModel, FlexibleRunner

CLASSES = ["empty", "row", "column", "cross"]


def pictures(count: int, seed: int) -> TensorDataset:
    """Noisy pictures of shape (1, 16, 16), each with a bright row, a bright column, both or none."""
    generator = torch.Generator().manual_seed(seed)
    images = 0.5 * torch.randn(count, 1, 16, 16, generator=generator)
    labels = torch.randint(len(CLASSES), (count,), generator=generator)
    for image, label in zip(images[:, 0], labels.tolist(), strict=True):
        row, column = torch.randint(2, 14, (2,), generator=generator).tolist()
        if CLASSES[label] in ("row", "cross"):
            image[row] += 1
        if CLASSES[label] in ("column", "cross"):
            image[:, column] += 1
    return TensorDataset(images, labels)


def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, len(CLASSES)),
    )


class Classifier(BaseModel):
    """Gives the loss in training, and in validation what the metric needs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, images: Tensor, labels: Tensor, mode: str = "tensor") -> Any:
        logits = self.net(images)
        if mode == "loss":
            return {"loss": F.cross_entropy(logits, labels)}
        return (logits, labels) if mode == "predict" else logits


class Accuracy(BaseMetric):
    """Percentage of pictures whose class is recognised."""

    def process(self, data_batch: Any, data_samples: tuple[Tensor, Tensor]) -> None:
        logits, labels = data_samples
        self.results.extend((logits.argmax(dim=1) == labels).tolist())

    def compute_metrics(self, results: list[bool]) -> dict[str, float]:
        return {"accuracy": 100 * sum(results) / len(results)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", help="ddp, fsdp, zero2, ...: `flextrain list strategies`; default: chosen")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--work-dir", default="work_dirs/classification")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint")
    arguments = parser.parse_args()
    runner = FlexibleRunner(
        model=Classifier,
        work_dir=arguments.work_dir,
        strategy=arguments.strategy,
        train_dataloader=dict(batch_size=64, dataset=pictures(2048, seed=0), collate_fn="default_collate"),
        optim_wrapper=dict(optimizer=dict(type="AdamW", lr=2e-3), clip_grad=dict(max_norm=1.0)),
        param_scheduler=dict(type="CosineAnnealingLR", end=arguments.epochs, convert_to_iter_based=True),
        train_cfg=dict(max_epochs=arguments.epochs, val_interval=1),
        val_dataloader=dict(batch_size=64, dataset=pictures(512, seed=1), collate_fn="default_collate"),
        val_cfg=dict(),
        val_evaluator=dict(type=Accuracy),
        default_hooks=dict(checkpoint=dict(max_keep_ckpts=2, save_best="accuracy", overwrite=True)),
        randomness=dict(seed=0),
        resume=arguments.resume,
    )
    runner.train()


if __name__ == "__main__":
    main()
