"""IterBasedTrainLoop: training for a number of updates."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
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
        self._iterator: Iterator[Any] | None = None

    @property
    def _index(self) -> int:
        return self._done

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

    def run(self) -> Any:
        """Train, with validation after the iterations at which it is due."""
        runner = self._runner
        self._iter = self._done  # a hook of the last update may have ended the run before
        runner.call_hook("before_train")
        self.try_validation()
        self.validate(self._iter)
        runner.model.train()
        runner.call_hook("before_train_epoch")
        if not self.stop_training:
            self._run_iters()
        runner.call_hook("after_train_epoch")
        runner.call_hook("after_train")
        return runner.model

    def _run_iters(self) -> None:
        run_iter = self._iterate()
        for batch in self.batches():
            run_iter(self._done, batch)
            self._iter = self._done  # a subclass's own may leave the counting to the loop
            self.validate(self._iter)
            if self.stop_training:
                return

    def batches(self) -> Iterator[Any]:
        """See TrainLoop; those of all passes over the data that are left. An InfiniteSampler's pass never ends."""
        while self._done < self._max_iters:
            yield from self._due(self._inner + self._max_iters - self._done)
            if self._done < self._max_iters:
                if self._inner == 0:
                    raise self.data.no_batch()
                self._epoch += 1
                self._inner = 0

    @property
    def dataloader_iterator(self) -> Iterator[Any]:
        """The iterator over ``batches()``, as MMEngine's loop has it."""
        if self._iterator is None:
            self._iterator = self.batches()
        return self._iterator
