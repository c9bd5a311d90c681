"""ModelGroup: gradient norms and overflows over the processes that share one replica of a model."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor

from ..core import gradients
from ..core.comm import collectives as dist


class ModelGroup:
    """Combines gradient norms and overflows of processes that hold different parameters of one replica of a model.

    Args:
        group: the process group, ``Topology.model``.
        elsewhere: parameters of the optimizer that a lower rank of the group holds too; that rank counts them.
        dtype: of the norms that are sent, the same on all processes.
        device: of the gradients.
    """

    def __init__(self, group: Any, elsewhere: Collection[Tensor], dtype: torch.dtype, device: torch.device) -> None:
        self.group, self.dtype, self.device = group, dtype, device
        self._elsewhere = {id(parameter) for parameter in elsewhere}

    def total_norm(self, parameters: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
        """Return the norm of all gradients, 0-dim on the device; a collective of the group."""
        grads = [p.grad for p in parameters if p.grad is not None and id(p) not in self._elsewhere]
        own = gradients.total_norm(grads, norm_type) if grads else torch.zeros((), device=self.device)
        parts = dist.all_gather(own.to(self.device, self.dtype), self.group)
        total: Tensor = torch.linalg.vector_norm(torch.stack(parts), norm_type)
        return total

    def clip(
        self, parameters: Collection[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip the gradients so that their norm over the group is at most ``max_norm``; return the norm before."""
        total = self.total_norm(parameters, norm_type)
        if error_if_nonfinite:
            gradients.require_finite(total, norm_type)
        gradients.scale_down([p.grad for p in parameters if p.grad is not None], total, max_norm)
        return total

    def any(self, flag: Tensor) -> Tensor:
        """Return a number that is above 0 if ``flag``, 0-dim, is above 0 on any process of the group; a collective."""
        return dist.all_reduce(flag.clone(), "max", self.group)
