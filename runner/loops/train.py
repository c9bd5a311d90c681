"""Training loops: by epoch and by iteration."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

from ...core.config import PositiveInt
from ...core.errors import ConfigError
from ...core.registry import LOOPS
from ..data.dataloaders import TrainData

if TYPE_CHECKING:
    from ..run import Run


class BaseLoop:
    """Base class of all loops.

    Args:
        runner: the runner that the loop belongs to.
        dataloader: built, and split over processes.
    """

    def __init__(self, runner: Run, dataloader: Iterable[Any]) -> None:
        self.runner = runner
        self.dataloader = dataloader

    def run(self) -> Any:
        """Run the loop over its data."""
        raise NotImplementedError


VALIDATION_KEYS = {"val_begin", "val_interval", "dynamic_intervals"}
"""Arguments of the training loops that schedule validation."""


class TrainLoop(BaseLoop):
    """Base class of training loops: counts epochs and iterations, and makes one update per window of micro-batches.

    An iteration is one update. ``epoch`` and ``iter`` start at 0 and increase after the hooks of an epoch or iteration.
    """

    by_epoch: bool = True

    def __init__(
        self,
        runner: Run,
        dataloader: Iterable[Any],
        val_begin: PositiveInt = 1,
        val_interval: PositiveInt = 1,
        dynamic_intervals: list[tuple[int, PositiveInt]] | None = None,
    ) -> None:
        super().__init__(runner, dataloader)
        self.val_begin = val_begin
        self.data = TrainData(
            dataloader,
            runner.accumulate,
            runner.seed,
            diff_rank_seed=runner.options.randomness.diff_rank_seed,
            shard=runner.strategy.topology.shard,
        )
        self.stop_training = False
        self.is_torn = False  # True if an exception has left an update unfinished
        self.start_iter = 0
        self._epoch = 0
        self._iter = 0
        # These two already count the update whose hooks are running; ``iter`` does not.
        self._done = 0
        self._inner = 0  # updates of the current epoch
        self._validated = 0  # epochs or iterations done at the last validation
        self._ahead = 0  # updates gained over epochs of constant length, after resuming
        later = sorted(dynamic_intervals or ())
        self._milestones = [0, *(begin for begin, _ in later)]
        self._intervals = [val_interval, *(interval for _, interval in later)]
        if self.data.epoch_length == 0:
            raise self.data.no_batch()

    @property
    def epoch(self) -> int:
        """Epochs completed."""
        return self._epoch

    @property
    def iter(self) -> int:
        """Updates completed."""
        return self._iter

    @property
    def inner(self) -> int:
        """Updates completed in the current epoch; in the hooks of an update, including that update."""
        return self._inner

    @property
    def max_epochs(self) -> int:
        """Total number of epochs."""
        raise NotImplementedError

    @property
    def max_iters(self) -> int:
        """Total number of updates."""
        raise NotImplementedError

    @property
    def epoch_length(self) -> int:
        """Updates of the current epoch; after resuming with other batches, as if the whole epoch had these."""
        return self.data.length(self._epoch) or self._length

    @property
    def _length(self) -> int:
        """Updates of a whole epoch; if it is endless, those of the run."""
        raise NotImplementedError

    def validate(self, done: int) -> None:
        """Validate if that is due after ``done`` epochs or iterations and was not done yet.

        A checkpoint is saved before the validation of its epoch or iteration. A resumed run must not skip that
        validation, because schedulers, early stopping and the best checkpoint depend on its metrics.
        """
        loop = self.runner.val_loop
        if loop is None or done < self.val_begin or done == self._validated:
            return
        # As in MMEngine, an interval holds from the next epoch or iteration on; validation at the end is always due.
        interval = self._intervals[bisect.bisect(self._milestones, done + 1) - 1]
        if done % interval == 0 or done == (self.max_epochs if self.by_epoch else self.max_iters):
            self.runner.strategy.meet("validation")
            loop.run()
            self._validated = done

    def run_iter(self, batch_idx: int, window: list[Any]) -> None:
        """Make one update, with its hooks; ``batch_idx`` is its index in the epoch."""
        runner, hooks = self.runner, self.runner.hook_calls
        batch = window[0] if self.data.accumulate == 1 else window
        for hook in hooks.before_train_iter:
            hook(runner, batch_idx, batch)
        try:
            outputs = runner.stepper.train(window)
        except BaseException:
            self.is_torn = True
            raise
        self._inner = batch_idx + 1
        self._done += 1
        for hook in hooks.after_train_iter:
            hook(runner, batch_idx, batch, outputs)
        self._iter = self._done

    def state_dict(self) -> dict[str, int | None]:
        """Return the position in training, correct inside hooks too.

        ``epoch`` and ``iter``: epochs and updates completed; ``inner`` and ``left``: updates done and left in the
        epoch, None for an endless one; ``validated``: epochs or iterations done at the last validation.
        """
        epoch, inner = self._progress()
        length = self.data.length(epoch)
        left = None if length is None else max(0, length - inner)
        return {"epoch": epoch, "iter": self._done, "inner": inner, "left": left, "validated": self._validated}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the position in ``state``; ``left`` is computed from the data."""
        self._epoch, self._iter, self._inner = state["epoch"], state["iter"], state["inner"]
        self._validated = state["validated"]
        self.start_iter = self._done = self._iter
        usual, length = self.data.epoch_length, self.data.length(self._epoch)
        if usual is not None and length is not None:
            self._ahead = self._iter + (length - self._inner) - (self._epoch + 1) * usual

    def _progress(self) -> tuple[int, int]:
        """Return the epoch, and the updates completed in it."""
        return self._epoch, self._inner


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
