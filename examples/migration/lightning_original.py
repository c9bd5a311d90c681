"""A digits classifier with Lightning's Trainer; lightning_flextrain.py is the same training with flextrain.

python examples/migration/lightning_original.py
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Accuracy


class Classifier(L.LightningModule):
    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        self.accuracy = Accuracy(task="multiclass", num_classes=10)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.net(images), labels)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.accuracy(self.net(images), labels)
        self.log("accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)]


def datasets() -> tuple[TensorDataset, TensorDataset]:
    data = load_digits()
    images = torch.tensor(data.data, dtype=torch.float32) / 16
    labels = torch.tensor(data.target)
    return TensorDataset(images[:1408], labels[:1408]), TensorDataset(images[1408:], labels[1408:])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--work-dir", default="work_dirs/lightning_original")
    arguments = parser.parse_args()

    L.seed_everything(0)
    model = Classifier(lr=2e-3)
    train_set, val_set = datasets()
    trainer = L.Trainer(
        max_epochs=arguments.epochs,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        default_root_dir=arguments.work_dir,
        callbacks=[L.pytorch.callbacks.ModelCheckpoint(monitor="accuracy", mode="max")],
        accelerator="cpu",
    )
    trainer.fit(model, DataLoader(train_set, batch_size=32), DataLoader(val_set, batch_size=256))
    torch.save(model.net.state_dict(), f"{arguments.work_dir}/weights.pth")
    print(f"accuracy {float(trainer.callback_metrics['accuracy']):.6f}")


if __name__ == "__main__":
    main()
