"""SequenceAttention: attention over a sequence that several processes share, for every model of a strategy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as torch_dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.nn.functional import scaled_dot_product_attention

from ....core.base.errors import StrategyError
from .batches import SequenceShards, Span

# Mask: which position attends to which, in a form of which every process can compute any tile.


@dataclass(frozen=True)
class Rule:
    """Which position attends to which, by their distance alone.

    Args:
        causal: to itself and to earlier ones only.
        window: to fewer than this number of positions before it, itself included; if not ``causal``, to those at a
            distance of at most this number on both sides. None: to any number.
    """

    causal: bool
    window: int | None = None

    def allows(self, query: Tensor, key: Tensor) -> Tensor:
        """Return a boolean tensor, broadcast from the positions of queries and of keys."""
        allowed = key <= query if self.causal else (key == key) & (query == query)
        if self.window is not None:
            near = key > query - self.window if self.causal else (query - key).abs() <= self.window
            allowed = allowed & near
        return allowed

    def of_all(self, queries: Span, keys: Span) -> bool | None:
        """Return whether all of the ``queries`` attend to all of the ``keys`` (True), none to any (False), or some."""
        first, last = queries[0], queries[1] - 1
        start, end = keys[0], keys[1] - 1
        if self.causal and start > last:
            return False
        reach = None if self.window is None else self.window - 1 if self.causal else self.window
        if reach is not None and (first - end > reach or (not self.causal and start - last > reach)):
            return False
        if self.causal and end > first:
            return None
        if reach is not None and (last - start > reach or (not self.causal and end - first > reach)):
            return None
        return True


CAUSAL, FULL = Rule(True), Rule(False)


@dataclass(frozen=True, eq=False)
class Mask:
    """A rule, and what the batch adds to it.

    Args:
        rule: by position.
        keys: (samples, length) of bool: positions to which none attends are False, such as padding. None: there are none.
        documents: (samples, length) of numbers: a position attends to those of its own document only. None: one document.
    """

    rule: Rule
    keys: Tensor | None = None
    documents: Tensor | None = None

    @property
    def by_rule(self) -> bool:
        """Whether the rule says all."""
        return self.keys is None and self.documents is None

    def tile(self, queries: Span, keys: Span, device: torch.device) -> Tensor | bool:
        """Return who attends to whom: all (True), none (False), or a boolean tensor (samples or 1, 1, queries, keys)."""
        found = self.rule.of_all(queries, keys)
        if found is False:
            return False
        allowed = None
        if found is None:
            rows = torch.arange(*queries, device=device)[:, None]
            allowed = self.rule.allows(rows, torch.arange(*keys, device=device))[None, None]
        if self.keys is not None:
            counted = self.keys[:, keys[0] : keys[1]].to(device)[:, None, None]
            allowed = counted if allowed is None else allowed & counted
        if self.documents is not None:
            of_query = self.documents[:, queries[0] : queries[1]].to(device)
            of_key = self.documents[:, keys[0] : keys[1]].to(device)
            same = (of_query[:, :, None] == of_key[:, None])[:, None]
            allowed = same if allowed is None else allowed & same
        return True if allowed is None else allowed


# Ring attention: keys and values go round the processes, and in backward their gradients with them.


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


# Ulysses: an all-to-all gives each process some of the heads with the whole sequence, and another one takes them
# back.


def ulysses_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask,
    scale: float | None,
    shards: SequenceShards,
    group: Any,
    dropout: float = 0.0,
) -> Tensor:
    """Return the attention of this process's queries to the keys of all processes, by torch's own kernels.

    Args:
        query: (samples, heads, positions of this process, width); the number of processes divides that of the heads.
        key, value: the same with a number of heads that divides that of ``query``.
        mask, scale: see ``ring_attention``.
        dropout: probability; each process must draw random numbers of its own.

    Source: Jacobs et al., "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence
    Transformer Models", 2023.
    """
    count, shared = shards.count, query.shape[1] // key.shape[1]
    repeats = (
        math.lcm(key.shape[1], count) // key.shape[1]
    )  # with fewer heads of keys than processes, several have the same
    if repeats > 1:
        repeats = repeats if shared % repeats == 0 else shared
        key, value = (tensor.repeat_interleave(repeats, 1) for tensor in (key, value))
    query, key, value = (_whole_sequence(tensor, shards, group) for tensor in (query, key, value))
    shared = query.shape[1] // key.shape[1]
    if shared > 1:
        key, value = (tensor.repeat_interleave(shared, 1) for tensor in (key, value))
    causal = mask.by_rule and mask.rule == CAUSAL
    allowed = None
    if not causal and not (mask.by_rule and mask.rule == FULL):
        whole = (0, shards.length)
        found = mask.tile(whole, whole, query.device)
        allowed = found if isinstance(found, Tensor) else None
    out = scaled_dot_product_attention(
        query, key, value, attn_mask=allowed, dropout_p=dropout, is_causal=causal, scale=scale
    )
    return _own_positions(out, shards, group)


def _whole_sequence(tensor: Tensor, shards: SequenceShards, group: Any) -> Tensor:
    """(samples, heads, own positions, width) to (samples, own heads, all positions, width)."""
    received = _exchange(torch.stack(tensor.chunk(shards.count, 1)), group)
    return shards.join(received.unbind(), 2)


def _own_positions(tensor: Tensor, shards: SequenceShards, group: Any) -> Tensor:
    """The inverse of ``_whole_sequence``."""
    sent = torch.stack([shards.cut(tensor, 2, index) for index in range(shards.count)])
    return torch.cat(_exchange(sent, group).unbind(), 1)


def _exchange(tensors: Tensor, group: Any) -> Tensor:
    return cast(Tensor, _Exchange.apply(tensors, group))


class _Exchange(torch.autograd.Function):
    """All-to-all over the first dimension, which has an entry for each process."""

    @staticmethod
    def forward(ctx: Any, tensors: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _all_to_all(tensors, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(gradient, ctx.group), None


def _all_to_all(tensors: Tensor, group: Any) -> Tensor:
    sent = tensors.contiguous()
    received = torch.empty_like(sent)
    torch_dist.all_to_all_single(received, sent, group=group)
    return received


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
