"""SequenceAttention: attention over a sequence that several processes share, for every model of a strategy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from ....core.errors import StrategyError
from .masks import Mask, Rule
from .ring import Ring, ring_attention
from .sequence import SequenceShards
from .ulysses import ulysses_attention


class SequenceAttention:
    """Attention whose queries, keys and values are those of this process's positions.

    Args:
        kind: "ring" or "ulysses".
        mesh: of one dimension, the processes that share every sequence.

    Attributes:
        calls: number of calls, of which a check asks whether a model has any.
        is_local: it calls torch's attention itself, which means just that.
        is_apart: each position attends to itself alone, to find what else combines positions.
        dtype, device: of the last call.
        length: number of positions of the batch of the forward that is running; None before the first.
        keys, documents: what the batch of the forward that is running adds to its masks, see Mask.
    """

    def __init__(self, kind: str, mesh: DeviceMesh) -> None:
        self.kind, self.count, self.index = kind, mesh.size(), mesh.get_local_rank()
        self._group = mesh.get_group()
        self._ring = Ring(self._group, self.index, torch.distributed.get_process_group_ranks(self._group))
        self.calls = 0
        self.is_local = False
        self.is_apart = False
        self.dtype, self.device = torch.float32, torch.device(mesh.device_type)
        self.length: int | None = None
        self.keys: Tensor | None = None
        self.documents: Tensor | None = None

    def shards(self, length: int) -> SequenceShards:
        """Return the division of sequences of ``length`` positions."""
        return SequenceShards(length, self.count, self.kind == "ring" and length % (2 * self.count) == 0)

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Mask, scale: float | None, dropout: float, source: str
    ) -> Tensor:
        """Return attention as ``scaled_dot_product_attention`` has it, (samples, heads, positions, width).

        Tensors may be DTensors of another mesh, such as that of tensor parallelism, sharded by heads.

        Raises:
            StrategyError: a request that is impossible here; the message begins with ``source``.
        """
        return self._attend(query, key, value, mask, scale, dropout, source)

    def stay_uncompiled(self) -> None:
        """Let a compiled model call this as it is: each of its messages and tiles would be compiled for itself."""
        self._attend = torch.compiler.disable(self._attend)  # type: ignore[method-assign, no-untyped-call]

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Mask, scale: float | None, dropout: float, source: str
    ) -> Tensor:
        self.calls += 1
        if isinstance(query, DTensor):
            return self._on_shards_of_heads(query, key, value, mask, scale, dropout, source)
        own, others = query.shape[-2], key.shape[-2]
        if own != others or (self.length is not None and own * self.count != self.length):
            raise StrategyError(
                f"{source}: {own} queries and {others} keys, context parallelism needs the sequence's "
                f"{own if self.length is None else self.length // self.count} positions of this process for both"
            )
        if torch.is_autocast_enabled(query.device.type):
            dtype = torch.get_autocast_dtype(query.device.type)
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        self.dtype, self.device = query.dtype, query.device
        if self.is_apart:
            of_heads = query.shape[1] // key.shape[1]
            key, value = (tensor.repeat_interleave(of_heads, 1) for tensor in (key, value))
            return value + 0.0 * (query.sum(-1, keepdim=True) + key.sum(-1, keepdim=True))
        shards = self.shards(own * self.count)
        if self.kind == "ulysses":
            if query.shape[1] % self.count:
                raise StrategyError(
                    f'strategy.cp_kind: "ulysses" needs a number of heads that cp={self.count} divides, {source} has '
                    f'{query.shape[1]} on a process; choose "ring"'
                )
            with self._locally():
                return ulysses_attention(query, key, value, mask, scale, shards, self._group, dropout)
        if dropout:
            raise StrategyError(
                f'strategy.cp_kind: "ring" has no dropout of attention, {source} asks for {dropout}; choose "ulysses", or '
                "set it to 0"
            )
        return ring_attention(query, key, value, mask, scale, shards, self._ring)

    @contextmanager
    def _locally(self) -> Iterator[None]:
        self.is_local = True
        try:
            yield
        finally:
            self.is_local = False

    def _on_shards_of_heads(
        self, query: Any, key: Any, value: Any, mask: Mask, scale: float | None, dropout: float, source: str
    ) -> Tensor:
        mesh: DeviceMesh = query.device_mesh
        layout: Sequence[Placement] = [Replicate()] * mesh.ndim
        if mesh.ndim == 1 and query.placements == (Shard(1),) and key.shape[1] % mesh.size() == 0:
            layout = (Shard(1),)
        query, key, value = (one.redistribute(placements=layout).to_local() for one in (query, key, value))
        found = self(query, key, value, mask, scale, dropout, source)
        return cast(Tensor, DTensor.from_local(found, mesh, layout, run_check=False))

    def own(self, whole: Tensor) -> Tensor:
        """Return what this process has of a tensor with all positions along its last dimension."""
        return self.shards(whole.shape[-1]).cut(whole, -1, self.index)

    def mask(self, rule: Rule) -> Mask:
        """Return the mask of a rule, with what the batch of the forward that is running adds to it."""
        return Mask(rule, self.keys, self.documents)
