"""The same tiny training run, written by hand and for each library in the comparison.

Every function trains the same model on the batches of `loader` once, with `accumulate` batches per update. The libraries keep
their defaults, except that the loss is logged every LOG_INTERVAL updates. Each function imports its library, and raises
ImportError if the library is missing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

LOG_INTERVAL = 10
LR = 1e-3

_serial = itertools.count()


def layers() -> nn.Module:
    """A network so small that the loop takes most of the time of an iteration."""
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


class Net(nn.Module):
    """The model. Models below with another base class have the same number of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.layers(inputs), labels)


def by_hand(loader: DataLoader[Any], work_dir: Path, accumulate: int = 1) -> None:
    """The baseline: no log, no hook, no check."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for number, (inputs, labels) in enumerate(loader, 1):
        loss = model(inputs, labels)
        (loss if accumulate == 1 else loss / accumulate).backward()
        if number % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()


def flextrain(loader: DataLoader[Any], work_dir: Path, accumulate: int = 1) -> None:
    library = import_module("flextrain")
    _flexible_runner(library, library, loader, work_dir, accumulate, LOG_INTERVAL)


def mmengine(loader: DataLoader[Any], work_dir: Path, accumulate: int = 1) -> None:
    runner, model = import_module("mmengine.runner._flexible_runner"), import_module("mmengine.model")
    _flexible_runner(runner, model, loader, work_dir, accumulate, LOG_INTERVAL * accumulate)  # it counts batches


def _flexible_runner(
    runner_module: Any,
    model_module: Any,
    loader: DataLoader[Any],
    work_dir: Path,
    accumulate: int,
    interval: int,
) -> None:
    class Tiny(model_module.BaseModel):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers()

        def forward(self, inputs: Tensor, labels: Tensor, mode: str = "tensor") -> dict[str, Tensor]:
            return {"loss": F.cross_entropy(self.layers(inputs), labels)}

    runner = runner_module.FlexibleRunner(
        model=Tiny(),
        work_dir=str(work_dir),
        experiment_name=f"overhead_{next(_serial)}",
        train_dataloader=loader,
        optim_wrapper=dict(type="OptimWrapper", optimizer=dict(type="SGD", lr=LR), accumulative_counts=accumulate),
        param_scheduler=dict(type="LinearLR"),
        train_cfg=dict(by_epoch=True, max_epochs=1),
        default_hooks=dict(logger=dict(type="LoggerHook", interval=interval)),
    )
    runner.train()


def lightning(loader: DataLoader[Any], work_dir: Path, accumulate: int = 1) -> None:
    pl = import_module("lightning.pytorch")
    loggers = import_module("lightning.pytorch.loggers")

    class Tiny(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers()

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            inputs, labels = batch
            loss = F.cross_entropy(self.layers(inputs), labels)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=LR)
            schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "epoch"}}

    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        accumulate_grad_batches=accumulate,
        log_every_n_steps=LOG_INTERVAL,
        logger=loggers.CSVLogger(str(work_dir)),
        default_root_dir=str(work_dir),
        enable_progress_bar=False,
    )
    trainer.fit(Tiny(), loader)


def fabric(loader: DataLoader[Any], work_dir: Path, accumulate: int = 1) -> None:
    fabric = import_module("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    net = Net()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=LR))
    for number, (inputs, labels) in enumerate(fabric.setup_dataloaders(loader), 1):
        loss = model(inputs, labels)
        fabric.backward(loss if accumulate == 1 else loss / accumulate)
        if number % accumulate:
            continue
        optimizer.step()
        optimizer.zero_grad()
        if number % (LOG_INTERVAL * accumulate) == 0:
            fabric.print(f"{number}: {loss.item():.4f}")


def accelerate(loader: DataLoader[Any], work_dir: Path, accumulate: int = 1) -> None:
    accelerator = import_module("accelerate").Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    net = Net()
    model, optimizer, batches = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=LR), loader)
    for step, (inputs, labels) in enumerate(batches):
        with accelerator.accumulate(model):
            loss = model(inputs, labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if (step + 1) % (LOG_INTERVAL * accumulate) == 0:
            accelerator.print(f"{step + 1}: {loss.item():.4f}")


BASELINE = "hand-written loop"
CONTESTANTS: dict[str, Callable[[DataLoader[Any], Path, int], None]] = {
    BASELINE: by_hand,
    "flextrain": flextrain,
    "MMEngine FlexibleRunner": mmengine,
    "Lightning Trainer": lightning,
    "Lightning Fabric": fabric,
    "Accelerate": accelerate,
}
# The package whose version is shown with each name.
PACKAGES = {
    "flextrain": "flextrain",
    "MMEngine FlexibleRunner": "mmengine",
    "Lightning Trainer": "lightning",
    "Lightning Fabric": "lightning",
    "Accelerate": "accelerate",
}
