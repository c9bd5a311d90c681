"""Which modules are normalisation layers: one answer for all that treat them unlike others."""

from __future__ import annotations

from torch import nn

from .torch_private import BATCH_NORM_BASE, NORM_BASE

NORMS = (NORM_BASE, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, nn.LocalResponseNorm)
"""Everything of torch's that normalises: batch and instance normalisation of all dimensions, synchronised or lazy, and these."""

BATCH_NORM = BATCH_NORM_BASE
"""Base of those that normalise over the samples of a batch."""


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a normalisation layer."""
    return isinstance(module, NORMS)


def keeps_statistics(module: nn.Module) -> bool:
    """Whether a module has running statistics, which forward changes in training: batch and instance normalisation may."""
    return isinstance(module, NORM_BASE) and module.track_running_stats
