"""Training runs through FlexibleRunner on scikit-learn's digits, for workers that find the simulated device."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from flextrain import FlexibleRunner, Hook
from flextrain.core.comm.collectives import all_reduce
from flextrain.testing.loop import alone

BATCH = 64
ADAMW = dict(type="AdamW", lr=8e-3, weight_decay=0.05, fused=False)  # as on the CPU, bit for bit
CPU = dict(type="SingleDeviceStrategy", device="cpu")


def digits(count: int) -> TensorDataset:
    """The first ``count`` of the 8 x 8 images, (count, 1, 8, 8) from 0 to 1, and their classes."""
    from sklearn.datasets import load_digits  # its import takes a second, which only the workers need

    data = load_digits()
    images = torch.tensor(data.images[:count], dtype=torch.float32).unsqueeze(1) / 16
    return TensorDataset(images, torch.tensor(data.target[:count]))


class Classifier(nn.Module):
    """A convolution, a normalisation and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.GELU(), nn.MaxPool2d(2), nn.Flatten())
        self.head = nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 32), nn.Tanh(), nn.Linear(32, 10))

    def forward(self, images: Tensor, labels: Tensor, mode: str = "loss") -> Any:
        logits = self.head(self.features(images))
        if mode == "loss":
            return {"loss": functional.cross_entropy(logits, labels)}
        return logits, labels


@dataclass
class History(Hook):
    """The loss of each update, a mean over all processes."""

    losses: list[float] = field(default_factory=list)
    devices: set[str] = field(default_factory=set)

    def after_train_iter(
        self, runner: FlexibleRunner, batch_idx: int, data_batch: Any = None, outputs: Mapping[str, Any] | None = None
    ) -> None:
        assert outputs is not None
        self.devices.add(outputs["loss"].device.type)
        self.losses.append(float(all_reduce(outputs["loss"].detach().clone(), "mean")))


def make_runner(folder: Path, strategy: Mapping[str, Any], world_size: int, **changes: Any) -> FlexibleRunner:
    """A runner on global batches of 64, eight in an epoch."""
    config: dict[str, Any] = dict(
        model=Classifier,
        work_dir=folder,
        strategy=dict(strategy),
        train_dataloader=dict(
            batch_size=BATCH // world_size,
            dataset=digits(8 * BATCH),
            sampler=dict(type="DefaultSampler", shuffle=True),
            collate_fn="default_collate",
        ),
        optim_wrapper=dict(optimizer=ADAMW),
        train_cfg=dict(by_epoch=True, max_epochs=2),
        default_hooks=dict(checkpoint=None),
        randomness=dict(seed=5),
        log_level="ERROR",
    )
    return FlexibleRunner(**{**config, **changes})


def train(folder: Path, strategy: Mapping[str, Any], **changes: Any) -> tuple[list[float], set[str]]:
    """Losses of all updates, and on which kinds of device they were; every process of the job calls it."""
    return _run(folder, strategy, int(os.environ["WORLD_SIZE"]), **changes)


def train_on_cpu(folder: Path, **changes: Any) -> list[float]:
    """The same on the CPU, in this process alone."""
    with alone():
        losses, devices = _run(folder / f"of-{os.getpid()}", CPU, 1, **changes)
    assert devices == {"cpu"}
    return losses


def _run(folder: Path, strategy: Mapping[str, Any], world_size: int, **changes: Any) -> tuple[list[float], set[str]]:
    history = History()
    runner = make_runner(folder, strategy, world_size, custom_hooks=[history], **changes)
    try:
        runner.train()
        return history.losses, history.devices
    finally:
        runner.strategy.leave()
