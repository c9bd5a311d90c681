"""Loops: in which order batches, updates, validation and hooks come."""

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
    """What all loops share.

    Args:
        runner: whose loop it is.
        dataloader: built, and split over processes.
    """

    def __init__(self, runner: Run, dataloader: Iterable[Any]) -> None:
        self.runner = runner
        self.dataloader = dataloader

    def run(self) -> Any:
        """Go through the data."""
        raise NotImplementedError


VALIDATION_KEYS = {"val_begin", "val_interval", "dynamic_intervals"}
"""Arguments of the training loops that say when validation comes."""


class TrainLoop(BaseLoop):
    """Base of training loops: counters, windows of micro-batches, one update after another.

    An iteration is one update. ``epoch`` and ``iter`` count from 0 and move after the hooks of the epoch or iteration.
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
        self.is_torn = False  # whether an exception has left an update unfinished
        self.start_iter = 0
        self._epoch = 0
        self._iter = 0
        # Both count the update whose hooks are running, which ``iter`` does not yet.
        self._done = 0
        self._inner = 0  # of the epoch
        self._validated = 0  # after how many epochs or iterations the last validation came
        self._ahead = 0  # by how many updates of one whose epochs always had this length, if they had another before
        later = sorted(dynamic_intervals or ())
        self._milestones = [0, *(begin for begin, _ in later)]
        self._intervals = [val_interval, *(interval for _, interval in later)]
        if self.data.epoch_length == 0:
            raise self.data.no_batch()

    @property
    def epoch(self) -> int:
        """Epochs done."""
        return self._epoch

    @property
    def iter(self) -> int:
        """Updates done."""
        return self._iter

    @property
    def inner(self) -> int:
        """Updates done of the epoch, also in the hooks of the update that was just done."""
        return self._inner

    @property
    def max_epochs(self) -> int:
        """Epochs to do."""
        raise NotImplementedError

    @property
    def max_iters(self) -> int:
        """Updates to do."""
        raise NotImplementedError

    @property
    def epoch_length(self) -> int:
        """Updates of the epoch under way; of one that was resumed with other batches, counted as if all were like these."""
        return self.data.length(self._epoch) or self._length

    @property
    def _length(self) -> int:
        """Updates of a whole epoch; of one without an end, those of the run."""
        raise NotImplementedError

    def validate(self, done: int) -> None:
        """Validate, if that is due after ``done`` epochs or iterations and was not done yet.

        A checkpoint is saved before the validation that follows it, which a resumed run must not leave out: schedulers,
        early stopping and the choice of the best checkpoint go by its metrics.
        """
        loop = self.runner.val_loop
        if loop is None or done < self.val_begin or done == self._validated:
            return
        # As in MMEngine, an interval is in force as soon as its epoch or iteration comes next, and the end is always due.
        interval = self._intervals[bisect.bisect(self._milestones, done + 1) - 1]
        if done % interval == 0 or done == (self.max_epochs if self.by_epoch else self.max_iters):
            self.runner.strategy.meet("validation")
            loop.run()
            self._validated = done

    def run_iter(self, batch_idx: int, window: list[Any]) -> None:
        """One update, with its hooks; ``batch_idx`` is its place in the epoch."""
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
        """Where training stands, correct inside hooks too.

        ``epoch`` and ``iter``: epochs and updates done; ``inner`` and ``left``: updates done and left of the epoch, None
        for one without an end; ``validated``: after how many of them the last validation came.
        """
        epoch, inner = self._place()
        length = self.data.length(epoch)
        left = None if length is None else max(0, length - inner)
        return {"epoch": epoch, "iter": self._done, "inner": inner, "left": left, "validated": self._validated}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue there; ``left`` follows from the data."""
        self._epoch, self._iter, self._inner = state["epoch"], state["iter"], state["inner"]
        self._validated = state["validated"]
        self.start_iter = self._done = self._iter
        usual, length = self.data.epoch_length, self.data.length(self._epoch)
        if usual is not None and length is not None:
            self._ahead = self._iter + (length - self._inner) - (self._epoch + 1) * usual

    def _place(self) -> tuple[int, int]:
        """The epoch, and updates done of it."""
        return self._epoch, self._inner


@LOOPS.register_module()
class EpochBasedTrainLoop(TrainLoop):
    """Trains for a number of passes over the data.

    Args:
        max_epochs: passes.
        val_begin: first epoch, counted from 1, after which validation may run.
        val_interval: epochs between validations; one comes at the end too.
        dynamic_intervals: ``[(epoch, interval), ...]``: from that epoch on, this interval.
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
        """Train; validation comes after the epochs that it is due after."""
        runner = self.runner
        self._iter = self._done  # a hook of the last update may have ended the run before
        runner.call_hook("before_train")
        self.validate(self._epoch)
        while self._epoch < self._max_epochs and not self.stop_training:
            self.run_epoch()
            self.validate(self._epoch)
        runner.call_hook("after_train")

    def run_epoch(self) -> None:
        """One pass over the data, or what is left of it."""
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

    def _place(self) -> tuple[int, int]:
        """In the hooks after an epoch that epoch is done."""
        return (self._epoch, self._inner) if self._in_epoch or not self._inner else (self._epoch + 1, 0)


@LOOPS.register_module()
class IterBasedTrainLoop(TrainLoop):
    """Trains for a number of updates, starting the data anew whenever they end.

    Args:
        max_iters: updates.
        val_begin: first iteration, counted from 1, after which validation may run.
        val_interval: iterations between validations; one comes at the end too.
        dynamic_intervals: ``[(iteration, interval), ...]``: from that iteration on, this interval.
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
        """Train; validation comes after the iterations that it is due after."""
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
        """One pass over the data, or as much of it as is left to do; an InfiniteSampler's only one never ends."""
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
