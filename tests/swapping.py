"""ZeRO-3 with its state in files, also for models as small as those of the tests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flextrain.strategies import DeepSpeedStrategy
from flextrain.testing.models import SmallModel

SMALLEST_STATE, SMALLEST_PARAM = 1024, 512


def allow_small_files() -> None:
    """In a worker: let DeepSpeed, which keeps what is below 1 MiB in memory, put small tensors into files."""
    from deepspeed.runtime.swap_tensor import optimizer_utils, partitioned_param_swapper

    optimizer_utils.MIN_AIO_BYTES = SMALLEST_STATE  # the unit in which gradients are cut
    partitioned_param_swapper.MIN_AIO_BYTES = SMALLEST_PARAM


def on_files(folder: Path, optimizer: str = "nvme", param: str = "nvme", **more: Any) -> dict[str, Any]:
    """The strategy with optimizer state and parameters on these devices."""
    details = dict(more.pop("zero_optimization", {}))
    for key, device in (("offload_optimizer", optimizer), ("offload_param", param)):
        path = dict(nvme_path=str(folder)) if device == "nvme" else {}
        details[key] = {"device": device, **path, **details.get(key, {})}
    zero = dict(stage=3, stage3_param_persistence_threshold=0, **details)
    return dict(
        type=DeepSpeedStrategy, device="cpu", zero_optimization=zero, aio=dict(block_size=SMALLEST_PARAM), **more
    )


def swap_files(folder: Path) -> dict[str, int]:
    """The kinds of this process's swap files, "optimizer", "float32params" and the like, with their sizes in bytes."""
    found: dict[str, int] = {}
    for own in folder.glob(f"flextrain_swap_*_{os.getpid()}_*"):
        for path in own.rglob("*.swp"):
            found[path.parts[-3]] = found.get(path.parts[-3], 0) + path.stat().st_size
    return found


class Wide(SmallModel):
    """Wide enough for files, in half precision too: a frozen layer, a norm, uneven sizes, a layer that may be left out."""

    every = 1  # how often the layer is used

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(6, 200).requires_grad_(False)
        self.sometimes = nn.Linear(200, 200)
        self.norm = nn.BatchNorm1d(200)
        self.trained = nn.Linear(200, 33)
        self.head = nn.Linear(33, self.num_classes)
        self.calls = 0

    def logits(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.frozen(x))
        if self.training and torch.is_grad_enabled():
            self.calls += 1
        if self.calls % self.every == 0:
            x = x + self.sometimes(x)
        found: Tensor = self.head(torch.tanh(self.trained(self.norm(x))))
        return found
