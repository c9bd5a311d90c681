"""The layouts in which torch's attention on the CPU may be divided; DTensor knows only those of accelerators."""

from __future__ import annotations

import functools
from typing import Any

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

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
        mask = [] if attn_mask is None else [Replicate()]
        return [([one, one], [one, one, one, None, None, *mask, *([None] if mask else [])]) for one in independent]

    @register_sharding(CPU_ATTENTION_BACKWARD)  # type: ignore[untyped-decorator]
    def backward(
        grad: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, dropout_p: float, is_causal: bool, *,
        attn_mask: Any = None, scale: float | None = None,
    ) -> Any:  # fmt: skip
        return [([one] * 3, [one] * 6 + [None, None]) for one in independent]
