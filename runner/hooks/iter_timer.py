"""IterTimerHook: measures the time of iterations and estimates the time left."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from ...core.registry import HOOKS
from ..reporting.log_processor import num_batches
from .hook import Hook

if TYPE_CHECKING:
    from ..run import Run


@HOOKS.register_module()
class IterTimerHook(Hook):
    """Measures the seconds per iteration and the part spent waiting for data, and estimates the time left.

    Scalars are ``<mode>/time`` and ``<mode>/data_time``; the estimate is the info ``eta``, in seconds. Time of
    validation does not enter the estimate, and that of saves enters no iteration's. The hook never waits for the device:
    its work shows in the iteration that waits for it.
    """

    priority = "NORMAL"

    def __init__(self) -> None:
        self._last = 0.0
        self._mode = "train"
        # Seconds and iterations of training, and of the current validation or test.
        self._seconds = self._eval_seconds = 0.0
        self._done = self._eval_done = 0
        self._loop: Any = None
        self._loop_s = self._saved_s = 0.0
        self.waited_s = 0.0
        """Seconds of this training in which this process has waited for data."""
        self._start = self._to_do = 0

    def before_train(self, runner: Run) -> None:
        """Reset the measurement; a resumed run starts from its iteration."""
        self._start, self._done, self._seconds, self.waited_s = runner.iter, 0, 0.0, 0.0
        self._loop = runner.train_loop
        self._loop_s = getattr(self._loop, "waited_s", 0.0)
        self._saved_s = getattr(runner, "saving_s", 0.0)
        self._data_times = runner.message_hub.history("train/data_time")
        self._times = runner.message_hub.history("train/time")
        self._last = time.perf_counter()

    def before_epoch(self, runner: Run, mode: str = "train") -> None:
        """Start the clock and publish the estimate."""
        runner.message_hub.compute_info("eta", partial(self._eta, runner))
        self._mode = mode
        if mode == "train":
            self._to_do = runner.max_iters - self._start
        self._eval_done, self._eval_seconds = 0, 0.0
        self._last, self._saved_s = time.perf_counter(), getattr(runner, "saving_s", 0.0)

    def after_epoch(self, runner: Run, mode: str = "train") -> None:
        """Switch the estimate back to training after a validation."""
        self._mode = "train"

    def after_val(self, runner: Run) -> None:
        """Restart the clock, so that the end of a validation does not count in the next iteration."""
        self._last, self._saved_s = time.perf_counter(), getattr(runner, "saving_s", 0.0)

    def before_train_iter(self, runner: Run, batch_idx: int, data_batch: Any = None) -> None:
        """Record the time spent waiting for the batch, without that of hooks and saves after the update before."""
        loop_s = getattr(self._loop, "waited_s", None)  # a loop of one's own may have none
        waited = time.perf_counter() - self._last if loop_s is None else loop_s - self._loop_s
        self._loop_s = loop_s or 0.0
        self.waited_s += waited
        self._data_times.put(waited)

    def after_train_iter(
        self,
        runner: Run,
        batch_idx: int,
        data_batch: Any = None,
        outputs: Mapping[str, Any] | None = None,
    ) -> None:
        """Record the time of the iteration."""
        now = time.perf_counter()
        seconds = now - self._last
        self._last = now
        self._seconds += seconds
        self._done += 1
        saved_s, self._saved_s = self._saved_s, getattr(runner, "saving_s", 0.0)
        self._times.put(seconds - (self._saved_s - saved_s))

    def before_iter(self, runner: Run, batch_idx: int, data_batch: Any = None, mode: str = "train") -> None:
        """Record the time spent waiting for a validation or test batch."""
        runner.message_hub.update_scalar(f"{mode}/data_time", time.perf_counter() - self._last)

    def after_iter(
        self,
        runner: Run,
        batch_idx: int,
        data_batch: Any = None,
        outputs: Any = None,
        mode: str = "train",
    ) -> None:
        """Record the time of a validation or test batch."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        self._eval_seconds += seconds
        self._eval_done += 1
        runner.message_hub.update_scalar(f"{mode}/time", seconds)

    def _eta(self, runner: Run) -> float | None:
        """Return the seconds left; None before the first iteration is done."""
        if self._mode != "train":
            done, seconds, length = self._eval_done, self._eval_seconds, num_batches(runner, self._mode)
        else:
            done, seconds, length = self._done, self._seconds, self._to_do
        return seconds / done * (length - done) if done else None
