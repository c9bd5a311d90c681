"""DistSamplerSeedHook: gives the epoch to samplers, for a new order of samples in every epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...core.registry import HOOKS
from ..data.epochs import tell_loader_epoch
from .hook import Hook

if TYPE_CHECKING:
    from ..run import Run


@HOOKS.register_module()
class DistSamplerSeedHook(Hook):
    """Calls ``set_epoch`` of the training sampler, so that every epoch has a new order, the same on all processes."""

    priority = "NORMAL"

    def before_train_epoch(self, runner: Run) -> None:
        """Call ``set_epoch`` of every part of the training data that has it.

        The dataloaders call it too before they are read. Custom loops may read one directly, and need this call.
        """
        tell_loader_epoch(runner.train_dataloader, runner.epoch)
