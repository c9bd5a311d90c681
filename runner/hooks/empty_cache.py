"""EmptyCacheHook: frees cached device memory at fixed points."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...core.device import empty_cache
from ...core.registry import HOOKS
from .hook import Hook

if TYPE_CHECKING:
    from ..run import Run


@HOOKS.register_module()
class EmptyCacheHook(Hook):
    """Returns memory that the caching allocator holds to the device.

    Args:
        before_epoch: before every epoch of training, validation and testing.
        after_epoch: after every epoch.
        after_iter: after every iteration.
    """

    priority = "NORMAL"

    def __init__(self, before_epoch: bool = False, after_epoch: bool = True, after_iter: bool = False) -> None:
        self._does_before_epoch = before_epoch
        self._does_after_epoch = after_epoch
        self._does_after_iter = after_iter

    def before_epoch(self, runner: Run, mode: str = "train") -> None:
        """Empty the cache if ``before_epoch`` is set."""
        if self._does_before_epoch:
            empty_cache(runner.strategy.device)

    def after_epoch(self, runner: Run, mode: str = "train") -> None:
        """Empty the cache if ``after_epoch`` is set."""
        if self._does_after_epoch:
            empty_cache(runner.strategy.device)

    def after_iter(
        self,
        runner: Run,
        batch_idx: int,
        data_batch: Any = None,
        outputs: Any = None,
        mode: str = "train",
    ) -> None:
        """Empty the cache if ``after_iter`` is set."""
        if self._does_after_iter:
            empty_cache(runner.strategy.device)
