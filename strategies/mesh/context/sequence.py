"""Which positions of a sequence each process has: a range of them, or one from either end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Span = tuple[int, int]
"""Positions [start, stop) of the whole sequence."""


@dataclass(frozen=True)
class SequenceShards:
    """The division of a sequence over processes.

    Under a causal mask the last positions attend to the most others. Therefore, if ``balanced``, a process has one of
    ``2 * count`` spans from the start and the one at the same distance from the end, which is equal work for all.

    Args:
        length: number of positions; ``count`` divides it, and ``2 * count`` if ``balanced``.
        count: number of processes.
    """

    length: int
    count: int
    balanced: bool

    def spans(self, index: int) -> list[Span]:
        """Return the positions of process ``index``, in the order in which it has them."""
        if not self.balanced:
            size = self.length // self.count
            return [(index * size, (index + 1) * size)]
        size = self.length // (2 * self.count)
        return [(at * size, (at + 1) * size) for at in (index, 2 * self.count - 1 - index)]

    def cut(self, whole: Tensor, dim: int, index: int) -> Tensor:
        """Return what process ``index`` has of a tensor with all positions along ``dim``."""
        found = [whole.narrow(dim, start, stop - start) for start, stop in self.spans(index)]
        return found[0] if len(found) == 1 else torch.cat(found, dim)

    def join(self, shards: Sequence[Tensor], dim: int) -> Tensor:
        """Return the tensor with all positions along ``dim``, in their order, from those of all processes."""
        if not self.balanced:
            return torch.cat(list(shards), dim)
        halves = [shard.chunk(2, dim) for shard in shards]
        return torch.cat([*(first for first, _ in halves), *(last for _, last in reversed(halves))], dim)
