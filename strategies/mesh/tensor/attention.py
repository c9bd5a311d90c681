"""The layouts in which torch's attention on the CPU may be divided; DTensor knows only those of accelerators."""

from __future__ import annotations

import functools
from typing import Any

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import Placement

from ....core.torch_private import CPU_ATTENTION, CPU_ATTENTION_BACKWARD


@functools.cache
def register_cpu_attention() -> None:
    """Teach DTensor that samples and heads are independent in attention on the CPU; once in a process."""
    independent = (Replicate(), Shard(0), Shard(1))  # (samples, heads, length, width)

    @register_sharding(CPU_ATTENTION)  # type: ignore[untyped-decorator]
    def forward(
        query: Any, key: Any, value: Any, dropout_p: float = 0.0, is_causal: bool = False, *,
        attn_mask: Any = None, scale: float | None = None,
    ) -> Any:  # fmt: skip
        return [([one, one], [one, one, one, None, None, *_mask(attn_mask, one)]) for one in independent]

    @register_sharding(CPU_ATTENTION_BACKWARD)  # type: ignore[untyped-decorator]
    def backward(
        grad: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, dropout_p: float, is_causal: bool, *,
        attn_mask: Any = None, scale: float | None = None,
    ) -> Any:  # fmt: skip
        return [([one] * 3, [one] * 6 + [None, None, *_mask(attn_mask, one)]) for one in independent]


def _mask(mask: Any, of_query: Placement) -> list[Placement | None]:
    """The layouts of a mask and a scale; a mask may have the size 1 where there are several samples or heads."""
    if mask is None:
        return []
    dim = getattr(of_query, "dim", None)
    is_shared = dim is None or len(mask.shape) < 4 or mask.shape[dim] == 1
    return [Replicate() if is_shared else of_query, None]
