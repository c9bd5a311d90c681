"""Training loops: by epoch and by iteration."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ...core.config import PositiveInt
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
        self._has_tried = False  # True after the dry pass
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

    def try_validation(self) -> None:
        """Make the dry pass of validation, before the first update of this process."""
        loop, batches = self.runner.val_loop, self.runner.options.env_cfg.dry_batches
        done, end = (self._epoch, self.max_epochs) if self.by_epoch else (self._iter, self.max_iters)
        if loop is not None and batches and done < end and not self._has_tried:
            self._has_tried = True
            dry_run = getattr(loop, "dry_run", None)
            if dry_run is None:
                self.runner.logger.info(f"Dry pass: left out, {type(loop).__name__} is not derived from EvalLoop")
                return
            self.runner.strategy.meet("the dry pass")
            dry_run(batches)

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
