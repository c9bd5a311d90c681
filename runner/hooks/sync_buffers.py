"""SyncBuffersHook: running statistics that are the same on all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...core.registry import HOOKS
from .hook import Hook

if TYPE_CHECKING:
    from ..run import Run


@HOOKS.register_module()
class SyncBuffersHook(Hook):
    """Replaces floating-point buffers by their means over the ranks after every training epoch.

    Loops without epochs do it before every validation.
    """

    priority = "NORMAL"

    def __init__(self) -> None:
        self._is_fresh = False

    def after_train_epoch(self, runner: Run) -> None:
        """Average, and spare the validation that follows."""
        runner.strategy.average_buffers()
        self._is_fresh = True

    def before_val_epoch(self, runner: Run) -> None:
        """Average, unless that was just done."""
        if not self._is_fresh:
            runner.strategy.average_buffers()
        self._is_fresh = False
