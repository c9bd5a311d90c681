"""What is made the same on all processes of a model: its weights at the beginning, its buffers later."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from .collectives import broadcast_tensors


def share_weights(model: nn.Module, parameters: Iterable[Tensor] | None = None) -> None:
    """Give every process rank 0's parameters and buffers, as far as they have memory; every process must call it.

    Args:
        model: whose.
        parameters: those that each process has as a whole; default: all.
    """
    tensors = (*(model.parameters() if parameters is None else parameters), *model.buffers())
    broadcast_tensors([tensor for tensor in tensors if not tensor.is_meta])


def floating_buffers(model: nn.Module) -> list[Tensor]:
    """The buffers that can be averaged; others (counters, masks) are the same on all processes or no matter of training."""
    return [buffer for buffer in model.buffers() if buffer.is_floating_point()]
