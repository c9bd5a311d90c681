"""DistSamplerSeedHook: a new order of the samples in every epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...core.registry import HOOKS
from ..data.epochs import tell_loader_epoch
from .hook import Hook

if TYPE_CHECKING:
    from ..run import Run


@HOOKS.register_module()
class DistSamplerSeedHook(Hook):
    """Tells the training sampler which epoch begins, so that all ranks shuffle alike and every epoch differently."""

    priority = "NORMAL"

    def before_train_epoch(self, runner: Run) -> None:
        """Call ``set_epoch`` wherever the training data have one.

        They call it too, before they are read: this one is for loops of the user's own, which may read the loader.
        """
        tell_loader_epoch(runner.train_dataloader, runner.epoch)
