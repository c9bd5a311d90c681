"""Loops of evaluation: once through the data, on every process equally often."""

from __future__ import annotations

from collections.abc import Sized
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from ..core import distributed as dist
from ..core.registry import LOOPS
from .evaluation import Evaluator, TorchMetric, build_evaluator
from .loops import BaseLoop

if TYPE_CHECKING:
    from .runner import FlexibleRunner


class EvalLoop(BaseLoop):
    """Goes once through validation or test data and evaluates the metrics.

    Every process runs forward equally often, because forward may communicate: one that has fewer batches repeats its last
    one, and nobody sees the result.

    Args:
        evaluator: metrics, or their configuration.
        fp16: forward under float16 autocast, whatever the training's precision.
    """

    mode = "val"

    def __init__(self, runner: FlexibleRunner, dataloader: DataLoader[Any], evaluator: Any, fp16: bool = False) -> None:
        super().__init__(runner, dataloader)
        self.evaluator: Evaluator = build_evaluator(evaluator, f"{self.mode}_evaluator")
        self.fp16 = fp16
        self.evaluator.dataset_meta = getattr(dataloader.dataset, "metainfo", None)

    @property
    def num_batches(self) -> int:
        """Batches of this process."""
        return len(self.dataloader)

    @torch.no_grad()
    def run(self) -> dict[str, Any]:
        """The metrics by name, on every process."""
        runner = self.runner
        runner.call_hook(f"before_{self.mode}")
        runner.call_hook(f"before_{self.mode}_epoch")
        runner.strategy.share_buffers()  # after the hooks, which may have averaged them
        was_training = runner.model.training
        runner.model.eval()
        self.evaluator.to(runner.strategy.device)
        batch, missing = None, self._num_missing()
        for i, batch in enumerate(self.dataloader):
            self.run_iter(i, batch)
        self._even_out(batch, missing)
        metrics = self.evaluator.evaluate(self._num_kept())
        runner.model.train(was_training)
        runner.call_hook(f"after_{self.mode}_epoch", metrics=metrics)
        runner.call_hook(f"after_{self.mode}")
        return metrics

    def run_iter(self, batch_idx: int, batch: Any) -> None:
        """One batch, with its hooks."""
        runner = self.runner
        for hook in runner.hook_calls[f"before_{self.mode}_iter"]:
            hook(runner, batch_idx, batch)
        outputs = self._forward(batch)
        self.evaluator.process(data_samples=outputs, data_batch=batch)
        for hook in runner.hook_calls[f"after_{self.mode}_iter"]:
            hook(runner, batch_idx, batch, outputs)

    def _forward(self, batch: Any) -> Any:
        if not self.fp16:
            return self.runner.stepper.evaluate(batch, self.mode)
        with torch.autocast(self.runner.strategy.device.type, torch.float16):
            return self.runner.stepper.evaluate(batch, self.mode)

    def _num_kept(self) -> int | None:
        """The number of samples, where the user's sampler repeats some so that all processes have as many."""
        size, sampler = len(self.dataloader.dataset), self.dataloader.sampler  # type: ignore[arg-type]
        seen = int(dist.all_reduce(torch.tensor(len(sampler) if isinstance(sampler, Sized) else 0)))
        if self.runner.world_size == 1 or seen <= size:
            return None
        if any(isinstance(metric, TorchMetric) for metric in self.evaluator.metrics):
            self.runner.logger.warning(
                f"{self.mode}_dataloader: its {type(sampler).__name__} repeats {seen - size} samples, which torchmetrics' "
                "metrics count again; give dict(type='DefaultSampler')"
            )
        return size

    def _num_missing(self) -> int:
        """How many batches this process has less than another; asked before any forward, which may communicate too."""
        own = len(self.dataloader)
        return int(dist.all_reduce(torch.tensor(own), "max")) - own

    def _even_out(self, last_batch: Any, missing: int) -> None:
        if missing and last_batch is None:
            last_batch = self.dataloader.collate_fn([self.dataloader.dataset[0]])
        for _ in range(missing):
            self._forward(last_batch)


@LOOPS.register_module()
class ValLoop(EvalLoop):
    """Validation; see EvalLoop."""


@LOOPS.register_module()
class TestLoop(EvalLoop):
    """Testing; see EvalLoop."""

    mode = "test"
