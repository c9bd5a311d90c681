"""Strategies that drive an update or an evaluation batch in a way of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flextrain import DataShard, Strategy, Topology
from flextrain.core.comm import collectives as dist
from flextrain.optim.gradients import average
from flextrain.strategies.base import EvalStep, TrainStep


class ForwardFirst(Strategy):
    """Forward of all micro-batches of a window, then backward of all, last one first."""

    def setup(self, model: nn.Module, optim: Any = None) -> Any:
        model, optim = super().setup(model, optim)
        optim.register_step_pre_hook(self._average)
        return model, optim

    def _average(self, optim: Any) -> None:
        average([p for group in optim.param_groups for p in group["params"]], DataShard())

    def run_window(self, window: Sequence[Any], step: TrainStep) -> dict[str, Tensor]:
        found = []
        for i, batch in enumerate(window):
            step.begin(i)
            found.append(step.forward(batch))
        for i, (loss, _) in reversed(list(enumerate(found))):
            step.backward(loss, i)
        return step.mean([logs for _, logs in found])


class CutsBatches(ForwardFirst):
    """All processes have the same data, and each computes with a part of every batch, as context parallelism does."""

    def _arrange(self) -> Topology:
        return Topology(data=DataShard(0, 1), reports=self.topology.rank == 0)

    def split(self, batch: Any) -> Any:
        return {name: part.tensor_split(self.topology.world_size)[self.topology.rank] for name, part in batch.items()}

    def run_window(self, window: Sequence[Any], step: TrainStep) -> dict[str, Tensor]:
        own = super().run_window(window, step)
        return {"loss": dist.all_reduce(own["loss"].clone(), "mean")}

    def evaluate(self, batch: Any, step: EvalStep) -> Any:
        parts = dist.all_gather_object(step.predict(batch))
        return torch.cat(parts) if self.topology.rank == 0 else None
