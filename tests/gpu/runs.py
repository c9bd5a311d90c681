"""Small training runs through FlexibleRunner on the device that is tested."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from flextrain import BaseMetric, FlexibleRunner, Hook

ADAMW = dict(type="AdamW", lr=3e-3, weight_decay=0.05)
BATCH, SAMPLES = 32, 256  # eight updates in an epoch
INTERVAL = 4  # of the log lines


def spots(count: int = SAMPLES, seed: int = 0) -> TensorDataset:
    """Noise, (count, 1, 16, 16), with a bright row; the class is which."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 10, (count,), generator=generator)
    x = torch.randn(count, 1, 16, 16, generator=generator) * 0.5
    x[torch.arange(count), 0, y] += 1.5
    return TensorDataset(x, y)


class Classifier(nn.Module):
    """A convolution, normalisations and linear layers, with dropout that draws on the device."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.GELU(), nn.MaxPool2d(2), nn.Flatten()
        )
        self.head = nn.Sequential(
            nn.Linear(1024, 64), nn.LayerNorm(64), nn.Tanh(), nn.Dropout(dropout), nn.Linear(64, 10)
        )

    def forward(self, x: Tensor, y: Tensor, mode: str = "loss") -> Any:
        logits = self.head(self.features(x))
        if mode == "loss":
            return {"loss": functional.cross_entropy(logits.float(), y)}
        return logits, y


class Accuracy(BaseMetric):
    """The share of right answers; keeps what it is given, on the device, until the end."""

    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results.append(data_samples)

    def compute_metrics(self, results: list[Any]) -> dict[str, Any]:
        right = torch.cat([(logits.argmax(1) == y).float() for logits, y in results])
        return {"accuracy": float(right.mean())}


class Losses(Hook):
    """The losses as they came: tensors that nobody has read."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Mapping[str, Any] | None = None
    ) -> None:
        assert outputs is not None
        self.tensors.append(outputs["loss"])

    @property
    def numbers(self) -> list[float]:
        return [float(tensor) for tensor in self.tensors]


def make_runner(folder: Path, device: str | None, epochs: int = 1, **changes: Any) -> FlexibleRunner:
    """A run over ``spots``, seeded; ``device`` None takes what the strategy finds."""
    strategy = dict(changes.pop("strategy", dict(type="SingleDeviceStrategy")))
    arguments: dict[str, Any] = dict(
        model=changes.pop("model", Classifier),
        work_dir=folder,
        strategy=strategy if device is None else {**strategy, "device": device},
        train_dataloader=dict(batch_size=BATCH, dataset=spots(), collate_fn="default_collate"),
        optim_wrapper=dict(optimizer=ADAMW),
        train_cfg=dict(max_epochs=epochs),
        default_hooks=dict(logger=dict(interval=INTERVAL), **changes.pop("default_hooks", {})),
        randomness=dict(seed=5),
    )
    return FlexibleRunner(**{**arguments, **changes})


def losses(folder: Path, device: str | None, **changes: Any) -> list[float]:
    """Of each update of a run, torn down afterwards."""
    kept = Losses()
    runner = make_runner(folder, device, custom_hooks=[kept, *changes.pop("custom_hooks", [])], **changes)
    try:
        runner.train()
        return kept.numbers
    finally:
        runner.strategy.leave()


def validation() -> dict[str, Any]:
    """The three parts of validation."""
    return dict(
        val_dataloader=dict(batch_size=BATCH, dataset=spots(100, seed=1), collate_fn="default_collate"),
        val_cfg=dict(),
        val_evaluator=dict(type=Accuracy),
    )
