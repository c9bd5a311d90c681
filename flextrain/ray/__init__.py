"""flextrain on Ray: a train loop for Ray's TorchTrainer, and the hook that reports metrics and checkpoints to Ray."""

from __future__ import annotations

from .ray_loop import train_loop
from .report import RayReportHook

__all__ = ["RayReportHook", "train_loop"]
