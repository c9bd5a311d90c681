"""UpdateGuard: skip updates whose loss or gradients are not finite."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..core import gradients
from ..core.comm.collectives import all_reduce
from ..core.rehearsing import rehearsing
from .model_group import ModelGroup


class UpdateGuard:
    """Sets all gradients of an update to NaN, on every process, if a loss of its window or a gradient is not finite.

    Any single gradient then shows that the update must be skipped. Loss scaling checks gradients in any case; without
    it, ``allows`` copies one number to the host at every update.
    """

    def __init__(self) -> None:
        self.left_out = 0
        """Number of skipped updates."""
        self._losses: list[Tensor] = []
        self._verdict: Tensor | None = None

    def note(self, loss: Tensor) -> None:
        """Record a loss before its backward."""
        self._losses.append(loss.detach())

    def spoil(self, grads: list[Tensor], model_group: ModelGroup | None = None) -> None:
        """Set the gradients to NaN if a gradient or a loss is not finite on any process; a collective.

        Args:
            grads: gradients of one optimizer.
            model_group: needed if a process may have neither losses nor gradients.
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
        """Return whether all losses and gradients were finite; waits for the device."""
        is_good = self._verdict is None or rehearsing() or bool(self._verdict.isfinite())
        self.left_out += not is_good
        return is_good
