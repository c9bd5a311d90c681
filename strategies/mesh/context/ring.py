"""Ring attention: keys and values go round the processes, and in backward their gradients with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from .masks import Mask
from .sequence import SequenceShards, Span

TILE = 1024
"""Positions of queries, and of keys, whose scores are in memory at the same time."""


@dataclass(frozen=True)
class Ring:
    """The processes of one sequence, each of which sends to the next.

    Args:
        group: their process group.
        index: number of this process in it.
        ranks: their global ranks, in their order.
    """

    group: Any
    index: int
    ranks: Sequence[int]

    def send_on(self, tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Start to send tensors to the next process; return a function that waits for those of the previous one."""
        count = len(self.ranks)
        to, source = self.ranks[(self.index + 1) % count], self.ranks[(self.index - 1) % count]
        sent = [tensor.contiguous() for tensor in tensors]
        received = [torch.empty_like(tensor) for tensor in sent]
        operations = [torch_dist.P2POp(torch_dist.isend, tensor, to, self.group) for tensor in sent]
        operations += [torch_dist.P2POp(torch_dist.irecv, tensor, source, self.group) for tensor in received]
        works = torch_dist.batch_isend_irecv(operations)

        def wait() -> list[Tensor]:
            for work in works:
                work.wait()
            sent.clear()  # until here the memory must not be used for anything else
            return received

        return wait


def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask, scale: float | None, shards: SequenceShards, ring: Ring
) -> Tensor:
    """Return the attention of this process's queries to the keys of all processes.

    Scores are computed tile by tile and never sent; they and all sums are in float32 at least.

    Args:
        query: (samples, heads, positions of this process, width).
        key, value: the same with a number of heads that divides that of ``query``; ``value`` may have another width.
        mask: which position attends to which. One that attends to none gives zeros.
        scale: factor of the scores; None: 1 / sqrt(width).

    Source: Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023; blocks are combined as
    in Dao et al., "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness", 2022.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    found: Tensor = _RingAttention.apply(query, key, value, mask, scale, shards, ring)
    return found


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Mask,
        scale: float,
        shards: SequenceShards,
        ring: Ring,
    ) -> Tensor:
        with torch.autocast(query.device.type, enabled=False):
            grouped, dtype = _grouped(query, key.shape[1]), _accumulated(query)
            sums = torch.full(grouped.shape[:-1], -torch.inf, dtype=dtype, device=query.device)
            out = torch.zeros(*grouped.shape[:-1], value.shape[-1], dtype=dtype, device=query.device)
            travelling = [key, value]
            for step in range(shards.count):
                wait = ring.send_on(travelling) if step < shards.count - 1 else None
                keys, values = (_unsqueezed(tensor) for tensor in travelling)
                for rows, columns, allowed in _tiles(mask, shards, ring.index, step, query.device):
                    scores = _scores(grouped[..., rows, :], keys[..., columns, :], scale, allowed)
                    before = sums[..., rows]
                    total = torch.logaddexp(before, torch.logsumexp(scores, -1))
                    base = torch.where(total == -torch.inf, 0.0, total)  # a position that attends to none
                    weights = (scores - base[..., None]).exp_()
                    kept = out[..., rows, :] * (before - base).exp_()[..., None]
                    out[..., rows, :] = kept + weights @ values[..., columns, :].to(dtype)
                    sums[..., rows] = total
                if wait is not None:
                    travelling = wait()
            found = out.to(query.dtype).flatten(1, 2)
        ctx.save_for_backward(query, key, value, found, sums)
        ctx.options = mask, scale, shards, ring
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, sums = ctx.saved_tensors
        mask, scale, shards, ring = ctx.options
        with torch.autocast(query.device.type, enabled=False):
            dtype = _accumulated(query)
            grouped, of_out = _grouped(query, key.shape[1]), _grouped(gradient, key.shape[1]).to(dtype)
            delta = (of_out * _grouped(out, key.shape[1]).to(dtype)).sum(-1)
            base = torch.where(sums == -torch.inf, 0.0, sums)
            of_query = torch.zeros(grouped.shape, dtype=dtype, device=query.device)
            travelling = [key, value]
            gradients = [torch.zeros(tensor.shape, dtype=dtype, device=query.device) for tensor in (key, value)]
            for step in range(shards.count):
                wait = ring.send_on(travelling) if step < shards.count - 1 else None
                keys, values = (_unsqueezed(tensor) for tensor in travelling)
                of_key, of_value = gradients
                for rows, columns, allowed in _tiles(mask, shards, ring.index, step, query.device):
                    queries = grouped[..., rows, :]
                    scores = _scores(queries, keys[..., columns, :], scale, allowed)
                    weights = (scores - base[..., rows, None]).exp_()
                    to_values = of_out[..., rows, :]
                    of_scores = to_values @ values[..., columns, :].to(dtype).transpose(-1, -2)
                    of_scores = (of_scores - delta[..., rows, None]) * weights * scale
                    of_query[..., rows, :] += of_scores @ keys[..., columns, :].to(dtype)
                    # Queries that share a head of keys add up.
                    of_key[..., columns, :] += (of_scores.transpose(-1, -2) @ queries.to(dtype)).sum(2)
                    of_value[..., columns, :] += (weights.transpose(-1, -2) @ to_values).sum(2)
                gradients = ring.send_on(gradients)()  # after the last step they are where their keys came from
                if wait is not None:
                    travelling = wait()
        found = (of_query.flatten(1, 2), *gradients)
        return *(part.to(query.dtype) for part in found), None, None, None, None


def _accumulated(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _grouped(tensor: Tensor, heads: int) -> Tensor:
    """(samples, heads of queries, ...) as (samples, heads of keys, queries for each, ...)."""
    return tensor.reshape(tensor.shape[0], heads, -1, *tensor.shape[2:])


def _unsqueezed(tensor: Tensor) -> Tensor:
    return tensor[:, :, None]


def _scores(query: Tensor, key: Tensor, scale: float, allowed: Tensor | bool) -> Tensor:
    dtype = _accumulated(query)
    scores = (query.to(dtype) @ key.to(dtype).transpose(-1, -2)) * scale
    return scores if isinstance(allowed, bool) else scores.masked_fill_(~allowed[:, :, None], -torch.inf)


def _tiles(
    mask: Mask, shards: SequenceShards, index: int, step: int, device: torch.device
) -> Iterator[tuple[slice, slice, Tensor | bool]]:
    """The tiles in which some query attends to some key of the process ``step`` before: local rows, columns, and the mask."""
    for queries, rows in _local(shards.spans(index)):
        for keys, columns in _local(shards.spans((index - step) % shards.count)):
            allowed = mask.tile(queries, keys, device)
            if allowed is not False:
                yield rows, columns, allowed


def _local(spans: Sequence[Span]) -> Iterator[tuple[Span, slice]]:
    """The spans in tiles, each with its local indices."""
    offset = 0
    for start, stop in spans:
        for at in range(start, stop, TILE):
            end = min(at + TILE, stop)
            yield (at, end), slice(offset + at - start, offset + end - start)
        offset += stop - start
