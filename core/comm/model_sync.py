"""Broadcast a model's parameters and buffers from rank 0, and find the buffers that can be averaged."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .collectives import broadcast_tensors


def share_weights(model: nn.Module, parameters: Iterable[Tensor] | None = None) -> None:
    """Broadcast rank 0's parameters and buffers, except those on the meta device; every process must call it.

    Args:
        model: the module that has them.
        parameters: the parameters of which each process holds the whole; default: all.
    """
    tensors = (*(model.parameters() if parameters is None else parameters), *model.buffers())
    broadcast_tensors([tensor for tensor in tensors if not tensor.is_meta])


def floating_buffers(model: nn.Module) -> list[Tensor]:
    """The buffers that can be averaged; others (counters, masks) are equal on all, or do not affect training.

    Of a DTensor it is what this process holds of it, on the same memory.
    """
    found = [buffer for buffer in model.buffers() if can_be_averaged(buffer)]
    return [buffer.to_local() if isinstance(buffer, DTensor) else buffer for buffer in found]


def can_be_averaged(buffer: Tensor) -> bool:
    """Whether a buffer holds numbers of which a mean has a meaning."""
    return buffer.is_floating_point() or buffer.is_complex()
