"""EpochBasedTrainLoop: training in passes over the data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
        self._ended: int | None = None  # the epoch that has ended last, until the next one begins

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

    @property
    def inner(self) -> int:
        """See TrainLoop."""
        return self._inner if self._ended in (None, self._epoch) else 0

    def run(self) -> Any:
        """Train, with validation after the epochs at which it is due."""
        runner = self._runner
        self._iter = self._done  # a hook of the last update may have ended the run before
        runner.call_hook("before_train")
        self.try_validation()
        self.validate(self._epoch)
        while self._epoch < self._max_epochs and not self.stop_training:
            self._begin()
            begun = self._epoch
            self.run_epoch()
            if self._inner == 0:
                raise ConfigError(f"train_cfg.type: {type(self).__name__}.run_epoch made no update, see run_iter")
            self._ended, self._epoch = begun, begun + 1  # a subclass's own may leave the counting to the loop
            self.validate(self._epoch)
        runner.call_hook("after_train")
        return runner.model

    def run_epoch(self) -> None:
        """Train on one epoch, or on the rest of it."""
        runner = self._runner
        self._begin()
        runner.model.train()
        runner.call_hook("before_train_epoch")
        run_iter = self._iterate()
        for idx, batch in enumerate(self.batches(), self._inner):
            run_iter(idx, batch)
        if self._inner == 0:
            raise self.data.no_batch()
        self._ended = self._epoch
        runner.call_hook("after_train_epoch")
        self._epoch += 1

    def batches(self) -> Iterator[Any]:
        """See TrainLoop; those that are left in the epoch."""
        self._begin()
        return self._due()

    def _begin(self) -> None:
        if self._ended is not None:
            self._ended, self._inner = None, 0

    def _at_hook(self, point: str) -> None:
        if point == "after_train_epoch":
            self._ended = self._epoch

    def _progress(self) -> tuple[int, int]:
        """Return the epoch and its updates; in the hooks after an epoch, the epoch is counted as completed."""
        return (self._epoch, self._inner) if self._ended is None else (self._ended + 1, 0)
