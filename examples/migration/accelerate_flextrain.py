"""The training of accelerate_original.py with flextrain: the same weights.

python examples/migration/accelerate_flextrain.py
torchrun --nproc-per-node 2 examples/migration/accelerate_flextrain.py
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from flextrain import BaseMetric, FlexibleRunner


class Classifier(nn.Sequential):
    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = super().forward(images)
        return {"loss": F.cross_entropy(logits, labels), "correct": logits.argmax(1) == labels}


class Accuracy(BaseMetric):
    def process(self, data_batch: list[Tensor], data_samples: dict[str, Tensor]) -> None:
        self.results += data_samples["correct"].tolist()

    def compute_metrics(self, results: list[bool]) -> dict[str, float]:
        return {"accuracy": sum(results) / len(results)}


def datasets() -> tuple[TensorDataset, TensorDataset]:
    data = load_digits()
    images = torch.tensor(data.data, dtype=torch.float32) / 16
    labels = torch.tensor(data.target)
    return TensorDataset(images[:1408], labels[:1408]), TensorDataset(images[1408:], labels[1408:])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--work-dir", default="work_dirs/accelerate_flextrain")
    arguments = parser.parse_args()

    train_set, val_set = datasets()
    runner = FlexibleRunner(
        model=lambda: Classifier(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)),
        train_dataloader=DataLoader(train_set, batch_size=32),
        optim_wrapper=dict(
            optimizer=dict(type="AdamW", lr=2e-3, weight_decay=0.01),
            accumulative_counts=2,
            clip_grad=dict(max_norm=1.0),
        ),
        param_scheduler=dict(type="CosineAnnealingLR", convert_to_iter_based=True, T_max=arguments.epochs),
        train_cfg=dict(max_epochs=arguments.epochs),
        val_dataloader=DataLoader(val_set, batch_size=256),
        val_cfg=dict(),
        val_evaluator=dict(type=Accuracy),
        default_hooks=dict(checkpoint=dict(interval=1, overwrite=True)),
        randomness=dict(seed=0),
        work_dir=arguments.work_dir,
    )
    model = runner.train()
    if runner.rank == 0:
        torch.save(model.state_dict(), f"{arguments.work_dir}/weights.pth")


if __name__ == "__main__":
    main()
