"""UpdateGuard: an update whose loss or gradients are not finite is not made."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..core import gradients
from ..core.comm.collectives import all_reduce
from .model_group import ModelGroup


class UpdateGuard:
    """Watches the losses of a window, and spoils all gradients of an update in which anything is not finite.

    All of them are NaN then, on every process, so that whoever looks at one knows of it: loss scaling does so in any case,
    without it the host reads one number at every update.
    """

    def __init__(self) -> None:
        self.left_out = 0
        """Updates that were not made."""
        self._losses: list[Tensor] = []
        self._verdict: Tensor | None = None

    def note(self, loss: Tensor) -> None:
        """Remember a loss that is about to be differentiated."""
        self._losses.append(loss.detach())

    def spoil(self, grads: list[Tensor], model_group: ModelGroup | None = None) -> None:
        """Make NaN of the gradients if one of them or of the losses is not finite, on any process; collective.

        Args:
            grads: of one optimizer.
            model_group: set where a process may have neither losses nor gradients.
        """
        losses, self._losses = self._losses, []
        parts = [loss.float().reshape(()) for loss in losses]
        if grads:
            norm = gradients.total_norm(grads).float()
            parts = [*(part.to(norm.device) for part in parts), norm]
        if not parts and model_group is not None:
            parts = [torch.zeros((), device=model_group.device)]
        if not parts:
            self._verdict = None
            return
        self._verdict = verdict = all_reduce(torch.stack(parts).sum())
        gradients.multiply(grads, torch.where(verdict.isfinite(), 1.0, math.nan))

    def allows(self) -> bool:
        """Whether all was finite; waits for the device."""
        is_good = self._verdict is None or bool(self._verdict.isfinite())
        self.left_out += not is_good
        return is_good
