"""ModelGroup: norms and overflows over processes that hold different parameters of one copy of a model."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor

from ..core import gradients
from ..core.comm import collectives as dist


class ModelGroup:
    """Looks at the gradients of all parts of a model as if one process had them, as one does that holds all of it.

    Args:
        group: the processes, as ``Topology.model`` names them.
        elsewhere: those of the optimizer's parameters that a process before this one has too, and counts.
        dtype: of norms on their way, the same on all processes.
        device: where gradients are.
    """

    def __init__(self, group: Any, elsewhere: Collection[Tensor], dtype: torch.dtype, device: torch.device) -> None:
        self.group, self.dtype, self.device = group, dtype, device
        self._elsewhere = {id(parameter) for parameter in elsewhere}

    def total_norm(self, parameters: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
        """The norm of all gradients, 0-dim on the device; every process of the group must ask."""
        grads = [p.grad for p in parameters if p.grad is not None and id(p) not in self._elsewhere]
        own = gradients.total_norm(grads, norm_type) if grads else torch.zeros((), device=self.device)
        parts = dist.all_gather(own.to(self.device, self.dtype), self.group)
        total: Tensor = torch.linalg.vector_norm(torch.stack(parts), norm_type)
        return total

    def clip(
        self, parameters: Collection[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scale all gradients so that their norm over the group is at most ``max_norm``; returns the norm before."""
        total = self.total_norm(parameters, norm_type)
        if error_if_nonfinite:
            gradients.require_finite(total, norm_type)
        gradients.scale_down([p.grad for p in parameters if p.grad is not None], total, max_norm)
        return total

    def any(self, flag: Tensor) -> Tensor:
        """A number that is above 0 if ``flag``, 0-dim, is so on any process of the group."""
        return dist.all_reduce(flag.clone(), "max", self.group)
