"""StepOrder: notices a scheduler that steps before its optimizer has made an update."""

from __future__ import annotations

import logging
from typing import Any

from torch.optim import Optimizer

logger = logging.getLogger("flextrain")


class StepOrder:
    """Warns if the first step of a scheduler comes before an update of its optimizer: a value would never be used.

    The runner keeps the order; a loop of one's own may not. Nothing is known of optimizers that are not torch's.

    Args:
        optimizer: an OptimWrapper or a torch optimizer; it has a hook until ``close``.
    """

    def __init__(self, optimizer: Any) -> None:
        inner = getattr(optimizer, "optimizer", optimizer)
        self._is_early = isinstance(inner, Optimizer)
        self._handle = inner.register_step_post_hook(self._has_updated) if self._is_early else None

    def _has_updated(self, *_: Any) -> None:
        self._is_early = False

    def check(self, scheduler: str) -> None:
        """Warn if there was no update so far, and close; called at the first step after that of the constructor."""
        self.close()
        if self._is_early:
            logger.warning(
                f"{scheduler}.step: called before the optimizer's first step, so a value is never used; call "
                "optimizer.step() before scheduler.step()"
            )

    def close(self) -> None:
        """Take the hook off the optimizer."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
