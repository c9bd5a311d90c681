"""FlatShard: a shard that is a range of a flattened tensor; checkpoints save and load it like other shards."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..torch_private import TO_COPY, wrapper_subclass
from .flat_ranges import chunks_of_range


class FlatShard(Tensor):
    """This process's flat range [start, start + n) of a logical tensor; other processes hold the other ranges.

    It has the logical tensor's shape and shares the memory of ``local``, so that loading into it fills ``local``. It
    can be copied, cast, cloned and interpolated, each process on its own range; for other operations use ``to_local``
    or ``full_tensor``.

    Args:
        local: the values of the range, one-dimensional and contiguous; may be empty.
        shape: shape of the logical tensor.
        start: begin of the range in the flattened logical tensor.
    """

    _local: Tensor
    start: int

    @staticmethod
    def __new__(cls, local: Tensor, shape: Sequence[int], start: int) -> FlatShard:
        """See the class for the arguments."""
        if local.dim() != 1 or not local.is_contiguous():
            raise ValueError(f"local: must be one-dimensional and contiguous, has shape {tuple(local.shape)}")
        if start < 0 or start + local.numel() > math.prod(shape):
            raise ValueError(f"start: {start} to {start + local.numel()} lies outside of shape {tuple(shape)}")
        shard: FlatShard = wrapper_subclass(cls, shape, local)
        shard._local, shard.start = local.detach(), start
        return shard

    def to_local(self) -> Tensor:
        """The values of this process, one-dimensional; they share memory."""
        return self._local

    def full_tensor(self) -> Tensor:
        """The whole tensor, from the disjoint ranges of all processes; a collective."""
        whole = self._local.new_zeros(math.prod(self.shape))
        whole[self.start : self.start + self._local.numel()] = self._local
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(whole)
        return whole.view(self.shape)

    def chunks(self) -> dict[tuple[int, ...], Tensor]:
        """This process's range as chunks: offsets to a view."""
        if self.numel() == 0:  # a checkpoint needs the shape of a tensor without elements too
            return {(0,) * self.dim(): self._local.view(self.shape)}
        found: dict[tuple[int, ...], Tensor] = {}
        position = 0
        for offsets, sizes in chunks_of_range(tuple(self.shape), self.start, self.start + self._local.numel()):
            length = math.prod(sizes)
            found[offsets] = self._local.narrow(0, position, length).view(sizes)
            position += length
        return found

    def _like(self, local: Tensor) -> FlatShard:
        return FlatShard(local, self.shape, self.start)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override,unused-ignore]
        """The range, shape, dtype and device, without values."""
        end = self.start + self._local.numel()
        return f"FlatShard([{self.start}:{end}] of {tuple(self.shape)}, {self.dtype}, {self.device})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override,unused-ignore]
        cls, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the few element-wise operations on the local values."""
        if func not in _ELEMENTWISE:
            raise NotImplementedError(f"{func}: not for a slice of a tensor, use to_local() or full_tensor()")
        shards = [arg for arg in args if isinstance(arg, FlatShard)]
        shard = shards[0]
        if any(other.start != shard.start or other.shape != shard.shape for other in shards[1:]) or any(
            isinstance(arg, Tensor) and arg.dim() > 0 and not isinstance(arg, FlatShard) for arg in args
        ):
            raise ValueError(f"{func}: both must be the same slice of tensors of one shape")
        result = func(*(arg._local if isinstance(arg, FlatShard) else arg for arg in args), **(kwargs or {}))
        # An in-place operation must return the object on which it was called.
        return shard if result is shard._local else shard._like(result)


_aten = torch.ops.aten
_ELEMENTWISE = frozenset(
    {
        _aten.detach.default,
        _aten.alias.default,
        _aten.clone.default,
        TO_COPY,
        _aten.copy_.default,
        _aten.empty_like.default,
        _aten.zeros_like.default,
        _aten.zero_.default,
        _aten.fill_.Scalar,
        _aten.lerp_.Scalar,
    }
)
