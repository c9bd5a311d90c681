"""The training of lightning_original.py with flextrain: the same losses and the same weights.

python examples/migration/lightning_flextrain.py
torchrun --nproc-per-node 2 examples/migration/lightning_flextrain.py
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Accuracy, MetricCollection

from flextrain import FlexibleRunner


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, images: Tensor, labels: Tensor, mode: str) -> dict[str, Tensor] | tuple[Tensor, Tensor]:
        logits = self.net(images)
        if mode == "loss":
            return {"loss": F.cross_entropy(logits, labels)}
        return logits, labels  # mode is "predict": what the metric's update() takes


def datasets() -> tuple[TensorDataset, TensorDataset]:
    data = load_digits()
    images = torch.tensor(data.data, dtype=torch.float32) / 16
    labels = torch.tensor(data.target)
    return TensorDataset(images[:1408], labels[:1408]), TensorDataset(images[1408:], labels[1408:])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--work-dir", default="work_dirs/lightning_flextrain")
    arguments = parser.parse_args()

    train_set, val_set = datasets()
    runner = FlexibleRunner(
        model=Classifier,
        train_dataloader=DataLoader(train_set, batch_size=32),
        optim_wrapper=dict(
            optimizer=dict(type="AdamW", lr=2e-3, weight_decay=0.01),
            accumulative_counts=2,
            clip_grad=dict(max_norm=1.0),
        ),
        param_scheduler=dict(type="StepLR", step_size=2, gamma=0.5),
        train_cfg=dict(max_epochs=arguments.epochs),
        val_dataloader=DataLoader(val_set, batch_size=256),
        val_cfg=dict(),
        val_evaluator=MetricCollection({"accuracy": Accuracy(task="multiclass", num_classes=10)}),
        default_hooks=dict(checkpoint=dict(save_best="accuracy", overwrite=True)),
        randomness=dict(seed=0),
        work_dir=arguments.work_dir,
    )
    model = runner.train()
    accuracy = runner.val()["accuracy"]
    if runner.rank == 0:
        torch.save(model.net.state_dict(), f"{arguments.work_dir}/weights.pth")
        print(f"accuracy {accuracy:.6f}")


if __name__ == "__main__":
    main()
