"""A digits classifier with MMEngine's FlexibleRunner; mmengine_flextrain.py is the same training with flextrain.

python examples/migration/mmengine_original.py
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from mmengine.evaluator import BaseMetric
from mmengine.model import BaseModel
from mmengine.runner._flexible_runner import FlexibleRunner
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset


class Classifier(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, images: Tensor, labels: Tensor, mode: str) -> Any:
        logits = self.net(images)
        if mode == "loss":
            return {"loss": F.cross_entropy(logits, labels)}
        return logits, labels


class Accuracy(BaseMetric):
    def process(self, data_batch: Any, data_samples: Any) -> None:
        logits, labels = data_samples
        self.results.append({"right": int((logits.argmax(1) == labels).sum()), "total": len(labels)})

    def compute_metrics(self, results: list[dict[str, int]]) -> dict[str, float]:
        return {"accuracy": sum(r["right"] for r in results) / sum(r["total"] for r in results)}


def dataloader(train: bool) -> dict[str, Any]:
    data = load_digits()
    images, labels = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    part = slice(0, 1408) if train else slice(1408, None)
    return dict(
        dataset=TensorDataset(images[part], labels[part]),
        batch_size=32,
        sampler=dict(type="DefaultSampler", shuffle=train),
        collate_fn=dict(type="default_collate"),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--work-dir", default="work_dirs/mmengine_original")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    model = Classifier()
    runner = FlexibleRunner(
        model=model,
        work_dir=arguments.work_dir,
        train_dataloader=dataloader(train=True),
        optim_wrapper=dict(
            optimizer=dict(type="AdamW", lr=2e-3, weight_decay=0.01),
            accumulative_counts=2,
            clip_grad=dict(max_norm=1.0),
        ),
        param_scheduler=dict(type="MultiStepLR", milestones=[2, 3], gamma=0.5),
        train_cfg=dict(by_epoch=True, max_epochs=arguments.epochs),
        val_dataloader=dataloader(train=False),
        val_cfg=dict(),
        val_evaluator=dict(type=Accuracy),
        randomness=dict(seed=0),
    )
    runner.train()
    torch.save(model.net.state_dict(), f"{arguments.work_dir}/weights.pth")


if __name__ == "__main__":
    main()
