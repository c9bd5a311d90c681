"""DistSamplerSeedHook: a new order of the samples in every epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...core.registry import HOOKS
from .hook import Hook

if TYPE_CHECKING:
    from ..run import Run


@HOOKS.register_module()
class DistSamplerSeedHook(Hook):
    """Tells the training sampler which epoch begins, so that all ranks shuffle alike and every epoch differently."""

    priority = "NORMAL"

    def before_train_epoch(self, runner: Run) -> None:
        """Call ``set_epoch`` of the sampler, or of the sampler in the batch sampler, if there is one.

        The training data call it too, and that of the loader and of the dataset, before they are read.
        """
        loader: Any = runner.train_dataloader
        for sampler in (getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
            for candidate in (sampler, getattr(sampler, "sampler", None)):
                set_epoch = getattr(candidate, "set_epoch", None)
                if set_epoch is not None:
                    set_epoch(runner.epoch)
                    return
