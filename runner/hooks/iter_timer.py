"""IterTimerHook: how long iterations take, and how long the rest will."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...core.registry import HOOKS
from ..reporting.log_processor import num_batches
from .hook import Hook

if TYPE_CHECKING:
    from ..runner import FlexibleRunner


@HOOKS.register_module()
class IterTimerHook(Hook):
    """Measures the seconds per iteration and those of them spent waiting for data, and estimates the time left.

    Scalars are ``<mode>/time`` and ``<mode>/data_time``; the estimate is the fact ``eta``, in seconds. Validation does not
    count into the estimate. Nothing waits for the device: its work shows in the iteration that does wait for it.
    """

    priority = "NORMAL"

    def __init__(self) -> None:
        self._last = 0.0
        self._total = 0.0
        self._evaluation_total = 0.0
        self._start_iter = 0

    def before_train(self, runner: FlexibleRunner) -> None:
        """Start anew, from a resumed iteration too."""
        self._start_iter, self._total = runner.iter, 0.0
        self._last = time.perf_counter()

    def before_epoch(self, runner: FlexibleRunner, mode: str = "train") -> None:
        """Start the clock."""
        if mode != "train":
            self._evaluation_total = 0.0
        self._last = time.perf_counter()

    def before_train_iter(self, runner: FlexibleRunner, batch_idx: int, data_batch: Any = None) -> None:
        """The data are here."""
        runner.message_hub.update_scalar("train/data_time", time.perf_counter() - self._last)

    def after_train_iter(
        self,
        runner: FlexibleRunner,
        batch_idx: int,
        data_batch: Any = None,
        outputs: Mapping[str, Any] | None = None,
    ) -> None:
        """The iteration is done."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        self._total += seconds
        hub, done = runner.message_hub, runner.iter + 1
        hub.update_scalar("train/time", seconds)
        hub.update_info("eta", self._total / (done - self._start_iter) * (runner.max_iters - done))

    def before_iter(self, runner: FlexibleRunner, batch_idx: int, data_batch: Any = None, mode: str = "train") -> None:
        """The data of a validation or test batch are here."""
        runner.message_hub.update_scalar(f"{mode}/data_time", time.perf_counter() - self._last)

    def after_iter(
        self,
        runner: FlexibleRunner,
        batch_idx: int,
        data_batch: Any = None,
        outputs: Any = None,
        mode: str = "train",
    ) -> None:
        """A validation or test batch is done."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        self._evaluation_total += seconds
        hub = runner.message_hub
        hub.update_scalar(f"{mode}/time", seconds)
        left = num_batches(runner, mode) - batch_idx - 1
        hub.update_info("eta", self._evaluation_total / (batch_idx + 1) * left)
