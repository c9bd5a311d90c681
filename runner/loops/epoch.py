"""EpochBasedTrainLoop: training in passes over the data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

from ...core.config import PositiveInt
from ...core.errors import ConfigError
from ...core.registry import LOOPS

if TYPE_CHECKING:
    from ..run import Run
from .train import TrainLoop


@LOOPS.register_module()
class EpochBasedTrainLoop(TrainLoop):
    """Trains for a number of epochs.

    Args:
        max_epochs: number of epochs.
        val_begin: first epoch, counted from 1, after which validation may run.
        val_interval: epochs between validations; the last epoch is always validated.
        dynamic_intervals: ``[(epoch, interval), ...]``: the interval holds from that epoch on.
    """

    def __init__(
        self,
        runner: Run,
        dataloader: Iterable[Any],
        max_epochs: PositiveInt,
        val_begin: PositiveInt = 1,
        val_interval: PositiveInt = 1,
        dynamic_intervals: list[tuple[int, PositiveInt]] | None = None,
    ) -> None:
        super().__init__(runner, dataloader, val_begin, val_interval, dynamic_intervals)
        if self.data.epoch_length is None:
            raise ConfigError(
                "train_cfg.by_epoch: the training data have no end or no length, give by_epoch=False and max_iters, or the "
                "dataset or loader a __len__"
            )
        self._max_epochs = max_epochs
        self._in_epoch = False

    @property
    def _length(self) -> int:
        return cast(int, self.data.epoch_length)

    @property
    def max_epochs(self) -> int:
        """See TrainLoop."""
        return self._max_epochs

    @property
    def max_iters(self) -> int:
        """See TrainLoop."""
        return self._max_epochs * self._length + self._ahead

    def run(self) -> None:
        """Train, with validation after the epochs at which it is due."""
        runner = self.runner
        self._iter = self._done  # a hook of the last update may have ended the run before
        runner.call_hook("before_train")
        self.try_validation()
        self.validate(self._epoch)
        while self._epoch < self._max_epochs and not self.stop_training:
            self.run_epoch()
            self.validate(self._epoch)
        runner.call_hook("after_train")

    def run_epoch(self) -> None:
        """Train on one epoch, or on the rest of it."""
        runner = self.runner
        self._in_epoch = True
        start = self._inner
        runner.model.train()
        runner.call_hook("before_train_epoch")
        for i, window in enumerate(self.data.windows(self._epoch, start), start):
            self.run_iter(i, window)
        if self._inner == 0:
            raise self.data.no_batch()
        self._in_epoch = False
        runner.call_hook("after_train_epoch")
        self._epoch += 1
        self._inner = 0

    def _progress(self) -> tuple[int, int]:
        """Return the epoch and its updates; in the hooks after an epoch, the epoch is counted as completed."""
        return (self._epoch, self._inner) if self._in_epoch or not self._inner else (self._epoch + 1, 0)
