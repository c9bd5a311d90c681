"""ParamSchedulerHook: steps learning rate and momentum schedulers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from ...core.base.registry import HOOKS
from .early_stopping import says_greater
from .hook import Hook

if TYPE_CHECKING:
    from ..run import Run


@HOOKS.register_module()
class ParamSchedulerHook(Hook):
    """Steps the parameter schedulers: by iteration, by epoch, or by the metrics of a validation.

    A scheduler that counts iterations counts applied updates: one that loss scaling skipped does not step it.
    """

    priority = "LOW"

    def __init__(self) -> None:
        self._by_iter: list[Any] = []
        self._by_epoch: list[Any] = []

    def check_metrics(self, runner: Run, names: Collection[str]) -> None:
        """Raise ConfigError if a scheduler monitors a metric that is missing."""
        for scheduler in (*self._by_epoch, *self._by_iter):
            scheduler.check_metrics(names)

    def before_train(self, runner: Run) -> None:
        """Sort the schedulers into those by iteration and those by epoch."""
        given = runner.param_schedulers or []
        schedulers = [s for group in given.values() for s in group] if isinstance(given, Mapping) else list(given)
        self._by_iter = [scheduler for scheduler in schedulers if not scheduler.by_epoch]
        self._by_epoch = [scheduler for scheduler in schedulers if scheduler.by_epoch]
        for scheduler in self._by_epoch:
            if (
                scheduler.need_val_args
                and getattr(scheduler, "rule", None) == "less"
                and says_greater(scheduler.monitor)
            ):
                runner.logger.warning(
                    f'{type(scheduler).__name__}.rule: with "less" the value falls while {scheduler.monitor} grows; give '
                    'rule="greater" if more is better'
                )

    def after_train_iter(
        self,
        runner: Run,
        batch_idx: int,
        data_batch: Any = None,
        outputs: Mapping[str, Any] | None = None,
    ) -> None:
        """Step the schedulers that count iterations."""
        for scheduler in self._by_iter:
            if not scheduler.optimizer.last_step.skipped:
                scheduler.step()

    def after_train_epoch(self, runner: Run) -> None:
        """Step the schedulers that count epochs."""
        for scheduler in self._by_epoch:
            scheduler.step()

    def after_val_epoch(self, runner: Run, metrics: dict[str, Any] | None = None) -> None:
        """Step the schedulers that depend on metrics, during training only."""
        for scheduler in self._by_epoch:
            if scheduler.need_val_args:
                scheduler.step(metrics or {})

    def after_train(self, runner: Run) -> None:
        """Leave training: a later validation must not step schedulers."""
        self._by_iter, self._by_epoch = [], []

    def on_exception(self, runner: Run, exception: BaseException) -> None:
        """Leave training: a later validation must not step schedulers."""
        self._by_iter, self._by_epoch = [], []
