"""SyncBuffersHook: averages buffers, such as running statistics, over the processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...core.registry import HOOKS
from .hook import Hook

if TYPE_CHECKING:
    from ..run import Run


@HOOKS.register_module()
class SyncBuffersHook(Hook):
    """Replaces floating-point buffers by their mean over the processes after every training epoch.

    Loops without epochs do this before every validation.
    """

    priority = "NORMAL"

    def __init__(self) -> None:
        self._is_fresh = False

    def after_train_epoch(self, runner: Run) -> None:
        """Average the buffers; the validation that follows need not do it again."""
        runner.strategy.average_buffers()
        self._is_fresh = True

    def before_val_epoch(self, runner: Run) -> None:
        """Average the buffers, unless this was done since the last validation."""
        if not self._is_fresh:
            runner.strategy.average_buffers()
        self._is_fresh = False
