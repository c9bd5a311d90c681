"""Float32 running statistics for batch normalisation in half precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...core.normalisation_layers import BATCH_NORM

_STATISTICS = ("running_mean", "running_var")


class KeepRunningStatistics:
    """Hooks that keep float32 running statistics for one batch normalisation with half-precision weights.

    torch requires statistics in the dtype of the weights, in which small changes of a mean are lost by rounding. So
    forward gets a copy; in training the copy is zero, and after forward it holds the batch's share of the new average.
    """

    def __init__(self, module: BATCH_NORM, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._kept: dict[str, Tensor] = {}
        module.register_forward_pre_hook(self._before)
        module.register_forward_hook(self._after, always_call=True)

    def _before(self, module: nn.Module, args: Any) -> None:
        assert isinstance(module, BATCH_NORM)
        for name in _STATISTICS:
            self._kept[name] = kept = module.get_buffer(name)
            copy = torch.zeros_like(kept, dtype=self._dtype) if module.training else kept.to(self._dtype)
            setattr(module, name, copy)

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        assert isinstance(module, BATCH_NORM)
        for name, kept in self._kept.items():
            share = module.get_buffer(name)
            setattr(module, name, kept)
            # Without output, forward has failed and nothing was averaged.
            if module.training and output is not None:
                assert module.num_batches_tracked is not None
                factor: Any = 1 / module.num_batches_tracked if module.momentum is None else module.momentum
                kept.mul_(1 - factor).add_(share)
        self._kept.clear()


def keep_running_statistics(module: nn.Module, dtype: torch.dtype) -> None:
    """Keep the running statistics of every batch normalisation in ``module`` in float32."""
    for part in module.modules():
        if isinstance(part, BATCH_NORM) and part.track_running_stats and part.affine:
            KeepRunningStatistics(part, dtype)
