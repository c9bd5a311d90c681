"""Which modules are normalisation layers: one answer for all that treat them unlike others."""

from __future__ import annotations

from torch import Tensor, nn

from .torch_private import BATCH_NORM_BASE, NORM_BASE

NORMS = (NORM_BASE, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, nn.LocalResponseNorm)
"""Everything of torch's that normalises: batch and instance normalisation of all dimensions, synchronised or lazy, and these."""

BATCH_NORM = BATCH_NORM_BASE
"""Base of those that normalise over the samples of a batch."""


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a normalisation layer."""
    return isinstance(module, NORMS)


def running_statistics(module: nn.Module) -> dict[str, Tensor]:
    """The buffers that forward changes in training, by name: those of batch and instance normalisation that keep an average."""
    return {
        name: buffer
        for prefix, part in module.named_modules()
        if isinstance(part, NORM_BASE) and part.track_running_stats
        for name, buffer in part.named_buffers(prefix, recurse=False)
    }
