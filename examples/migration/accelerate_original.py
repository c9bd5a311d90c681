"""A training loop with Accelerate; accelerate_flextrain.py is the same training with flextrain.

python examples/migration/accelerate_original.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def datasets() -> tuple[TensorDataset, TensorDataset]:
    data = load_digits()
    images = torch.tensor(data.data, dtype=torch.float32) / 16
    labels = torch.tensor(data.target)
    return TensorDataset(images[:1408], labels[:1408]), TensorDataset(images[1408:], labels[1408:])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--work-dir", default="work_dirs/accelerate_original")
    arguments = parser.parse_args()

    set_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    train_set, val_set = datasets()
    loader, val_loader = DataLoader(train_set, batch_size=32), DataLoader(val_set, batch_size=256)
    updates = arguments.epochs * len(loader) // 2
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=updates)
    model, optimizer, loader, val_loader, scheduler = accelerator.prepare(
        model, optimizer, loader, val_loader, scheduler
    )
    for epoch in range(arguments.epochs):
        model.train()
        for images, labels in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        model.eval()
        right = total = 0
        for images, labels in val_loader:
            with torch.no_grad():
                predicted, labels = accelerator.gather_for_metrics((model(images).argmax(1), labels))
            right, total = right + int((predicted == labels).sum()), total + len(labels)
        accelerator.print(f"epoch {epoch + 1} accuracy {right / total:.6f}")
        accelerator.save_state(f"{arguments.work_dir}/epoch_{epoch + 1}")
    if accelerator.is_main_process:
        Path(arguments.work_dir).mkdir(parents=True, exist_ok=True)
        torch.save(accelerator.unwrap_model(model).state_dict(), f"{arguments.work_dir}/weights.pth")


if __name__ == "__main__":
    main()
