"""Write your own axis for MeshStrategy: processes that divide the samples of one data loader's batches.

    torchrun --nproc-per-node 2 examples/custom_axis.py
    torchrun --nproc-per-node 4 examples/custom_axis.py

Reading may be what is slow: the processes of one group then read the same batch from a shared cache, and each computes with a part
of its samples. Everything else of MeshStrategy goes with it: sharding, tensor parallelism, checkpoints of every layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flextrain import STRATEGIES, Axis, FlexibleRunner, MeshStrategy
from flextrain.strategies.mesh import MeshConfig


class DividedBatches(Axis):
    """Each process has some samples of every batch, and computes with the same parameters: ``folds``."""

    name = "divide"
    folds = True

    def split(self, batch: list[Tensor]) -> list[Tensor]:
        return [part.tensor_split(self.size)[self.index] for part in batch]

    def run_window(self, window: Sequence[Any], step: Any, inner: Any) -> dict[str, Tensor]:
        logs: dict[str, Tensor] = inner(window, step)
        for value in logs.values():  # what is logged is the mean over the batch, not over a part of it
            dist.all_reduce(value, group=self.mesh.get_group())
            value /= self.size
        return logs

    def evaluate(self, batch: Any, step: Any, inner: Any) -> Any:
        parts: list[Any] = [None] * self.size
        dist.all_gather_object(parts, inner(batch, step), group=self.mesh.get_group())
        return [torch.cat(column) for column in zip(*parts, strict=True)]


class DividingConfig(MeshConfig):
    divide: int = 1
    """Processes that divide each batch."""


@STRATEGIES.register_module()
class DividingMesh(MeshStrategy):
    Config = DividingConfig
    axes = (DividedBatches, *MeshStrategy.axes)


if __name__ == "__main__":
    from train_classifier import Accuracy, Classifier, dataloader, digits, digits_net

    class WeightedClassifier(Classifier):
        def loss_weight(self, data_batch: list[Tensor]) -> int:
            return len(data_batch[1])  # parts may be unequal

    train_set, val_set = digits()
    FlexibleRunner(
        model=WeightedClassifier(digits_net()),
        work_dir="work_dirs/custom_axis",
        strategy=dict(type="DividingMesh", divide=2),
        train_dataloader=dataloader(train_set, batch_size=63, num_workers=0, shuffle=True),
        optim_wrapper=dict(type="OptimWrapper", optimizer=dict(type="AdamW", lr=2e-3)),
        train_cfg=dict(by_epoch=True, max_epochs=3),
        val_dataloader=dataloader(val_set, batch_size=63, num_workers=0, shuffle=False),
        val_cfg=dict(),
        val_evaluator=dict(type=Accuracy),
        default_hooks=dict(checkpoint=dict(overwrite=True)),
        randomness=dict(seed=0),
    ).train()
