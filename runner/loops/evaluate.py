"""Validation and test loops: every process runs forward equally often."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils.data import DataLoader, IterableDataset

from ...core.overriding import overridden
from ...core.registry import LOOPS
from ..data.dataloader_reader import Feed
from ..data.own_loader_reader import Reader
from ..data.user_loaders import goes_its_own_way, length_of
from ..metrics.evaluator import Evaluator, build_evaluator
from ..metrics.torchmetrics import TorchMetric
from .dry_pass import EVALUATION, DryPass
from .lockstep import until_all_end
from .train import BaseLoop

if TYPE_CHECKING:
    from ..run import Run


class EvalLoop(BaseLoop):
    """Evaluates the metrics over one pass of validation or test data.

    Every process runs forward equally often, because forward may run collectives: a process with fewer batches repeats
    its last one and ignores the result. One process of each data shard gives its predictions to the metrics.

    Args:
        evaluator: metrics, or their configuration.
        fp16: run forward under float16 autocast, whatever the precision of training.
    """

    mode = "val"

    def __init__(self, runner: Run, dataloader: Iterable[Any], evaluator: Any, fp16: bool = False) -> None:
        super().__init__(runner, dataloader)
        self.evaluator: Evaluator = build_evaluator(evaluator, f"{self.mode}_evaluator")
        self._topology = self.evaluator.topology = runner.strategy.topology
        self.fp16 = fp16
        own_way = goes_its_own_way(dataloader)
        self._reader = Reader(dataloader) if own_way else None
        self._feed = None if own_way else Feed(cast("DataLoader[Any]", dataloader), runner.strategy.topology.shard)
        self.evaluator.dataset_meta = getattr(getattr(dataloader, "dataset", None), "metainfo", None)
        self._passed, self._done = 0, 0  # batches of the last pass, and of the current one

    @property
    def num_batches(self) -> int:
        """Batches of this process; without a known length, those of the last pass, or of the current one so far."""
        length = length_of(self.dataloader)
        return max(self._passed, self._done) if length is None else length

    @torch.no_grad()
    def run(self) -> dict[str, Any]:
        """Evaluate the data, and return the metrics by name, on every process."""
        runner = self.runner
        self.evaluator.reset()
        runner.call_hook(f"before_{self.mode}")
        runner.call_hook(f"before_{self.mode}_epoch")
        runner.strategy.share_buffers()  # after the hooks, which may average them
        was_training = runner.model.training
        runner.model.eval()
        self.evaluator.to(runner.strategy.device)
        self._passed, self._done = self._done, 0
        for batch, is_own in self._batches():
            if is_own:
                self._done += 1
                self.run_iter(self._done - 1, batch)
            else:
                self._forward(batch)
        metrics = self.evaluator.evaluate(self._num_kept())
        runner.model.train(was_training)
        runner.call_hook(f"after_{self.mode}_epoch", metrics=metrics)
        runner.call_hook(f"after_{self.mode}")
        return metrics

    def run_iter(self, batch_idx: int, batch: Any) -> None:
        """Evaluate one batch, with its hooks."""
        runner = self.runner
        for hook in runner.hook_calls[f"before_{self.mode}_iter"]:
            hook(runner, batch_idx, batch)
        outputs = self._forward(batch)
        self.evaluator.process(data_samples=outputs, data_batch=batch)
        for hook in runner.hook_calls[f"after_{self.mode}_iter"]:
            hook(runner, batch_idx, batch, outputs)

    def dry_run(self, num_batches: int) -> None:
        """Evaluate the first ``num_batches`` so that nothing has changed afterwards; see DryPass.

        Left out if a subclass has its own ``run`` or ``run_iter``.
        """
        if own := overridden(self, "run", "run_iter"):
            self.runner.logger.info(f"Dry pass: left out, {type(self).__name__} defines its own {' and '.join(own)}")
            return
        DryPass(self.runner, self.dataloader, self.evaluator, self._forward, self.mode).make(num_batches)

    def _forward(self, batch: Any) -> Any:
        if not self.fp16:
            return self.runner.stepper.evaluate(batch, self.mode)
        with torch.autocast(self.runner.strategy.device.type, torch.float16):
            return self.runner.stepper.evaluate(batch, self.mode)

    def _num_kept(self) -> int | None:
        """Return the number of samples if the user's sampler repeats some to make processes even; otherwise None."""
        if self._topology.data.count == 1:
            return None
        dataset, sampler = (getattr(self.dataloader, name, None) for name in ("dataset", "sampler"))
        if goes_its_own_way(self.dataloader) or isinstance(dataset, IterableDataset):
            return None
        size = length_of(dataset) or 0
        seen = int(self._topology.data.sum(torch.tensor(length_of(sampler) or 0, device="cpu")))
        if seen <= size:
            return None
        if any(isinstance(metric, TorchMetric) for metric in self.evaluator.metrics):
            self.runner.logger.warning(
                f"{self.mode}_dataloader: its {type(sampler).__name__} repeats {seen - size} samples, which torchmetrics' "
                "metrics count again; give dict(type='DefaultSampler')"
            )
        return size

    def _batches(self) -> Iterator[tuple[Any, bool]]:
        """Yield batches, each with True if it is this process's own."""
        seed = self.runner.seed
        if self._feed is not None:
            one_pass = self._feed.batches(seed, EVALUATION)
        else:
            assert self._reader is not None
            one_pass = self._reader.batches(seed, 0, None)
        if self._topology.is_alone:
            return ((batch, True) for batch in one_pass)
        return until_all_end(one_pass, float(self.runner.strategy.config.timeout_s))


@LOOPS.register_module()
class ValLoop(EvalLoop):
    """Validates; see EvalLoop."""


@LOOPS.register_module()
class TestLoop(EvalLoop):
    """Tests; see EvalLoop."""

    mode = "test"
