"""IterBasedTrainLoop: training for a number of updates."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ...core.config import PositiveInt
from ...core.registry import LOOPS

if TYPE_CHECKING:
    from ..run import Run
from .train import TrainLoop


@LOOPS.register_module()
class IterBasedTrainLoop(TrainLoop):
    """Trains for a number of updates, starting the data again whenever they end.

    Args:
        max_iters: number of updates.
        val_begin: first iteration, counted from 1, after which validation may run.
        val_interval: iterations between validations; the last iteration is always validated.
        dynamic_intervals: ``[(iteration, interval), ...]``: the interval holds from that iteration on.
    """

    by_epoch = False

    def __init__(
        self,
        runner: Run,
        dataloader: Iterable[Any],
        max_iters: PositiveInt,
        val_begin: PositiveInt = 1,
        val_interval: PositiveInt = 1000,
        dynamic_intervals: list[tuple[int, PositiveInt]] | None = None,
    ) -> None:
        super().__init__(runner, dataloader, val_begin, val_interval, dynamic_intervals)
        self._max_iters = max_iters

    @property
    def _length(self) -> int:
        return self.data.epoch_length or self._max_iters

    @property
    def max_epochs(self) -> int:
        """See TrainLoop."""
        return math.ceil((self._max_iters - self._ahead) / self._length)

    @property
    def max_iters(self) -> int:
        """See TrainLoop."""
        return self._max_iters

    def run(self) -> None:
        """Train, with validation after the iterations at which it is due."""
        runner = self.runner
        self._iter = self._done  # a hook of the last update may have ended the run before
        runner.call_hook("before_train")
        self.try_validation()
        self.validate(self._iter)
        runner.model.train()
        runner.call_hook("before_train_epoch")
        while self._iter < self._max_iters and not self.stop_training:
            self._run_pass()
        runner.call_hook("after_train_epoch")
        runner.call_hook("after_train")

    def _run_pass(self) -> None:
        """Train on one pass over the data, or as much of it as is needed; an InfiniteSampler's pass never ends."""
        start = self._inner
        windows = self.data.windows(self._epoch, start, start + self._max_iters - self._iter)
        for i, window in enumerate(windows, start):
            self.run_iter(i, window)
            self.validate(self._iter)
            if self.stop_training or self._iter >= self._max_iters:
                return
        if self._inner == 0:
            raise self.data.no_batch()
        self._epoch += 1
        self._inner = 0
