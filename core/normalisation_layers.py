"""Find normalisation layers and their running statistics."""

from __future__ import annotations

from torch import Tensor, nn

from .torch_private import BATCH_NORM_BASE, NORM_BASE

NORMS = (NORM_BASE, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, nn.LocalResponseNorm)
"""All normalisation layers of torch; NORM_BASE has batch and instance normalisation, also synchronised and lazy."""

BATCH_NORM = BATCH_NORM_BASE
"""Base class of the layers that normalise over the samples of a batch."""


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a normalisation layer."""
    return isinstance(module, NORMS)


def acts_as_norm(module: nn.Module) -> bool:
    """Whether a module is a normalisation layer of torch, or one of somebody's own such as LlamaRMSNorm or T5LayerNorm.

    One's own is known by its class: "Norm" is in its name, and each parameter it holds itself has at most one dimension.
    """
    if is_norm(module):
        return True
    own = list(module.parameters(recurse=False))
    return bool(own) and "Norm" in type(module).__name__ and all(parameter.dim() <= 1 for parameter in own)


def running_statistics(module: nn.Module) -> dict[str, Tensor]:
    """The buffers, by name, that forward changes in training: statistics of batch and instance normalisation."""
    return {
        name: buffer
        for prefix, part in module.named_modules()
        if isinstance(part, NORM_BASE) and part.track_running_stats
        for name, buffer in part.named_buffers(prefix, recurse=False)
    }
