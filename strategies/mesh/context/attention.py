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
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention

from ....core.base.errors import StrategyError
from ....core.torch_compat.attention_private import AttentionKernel, attention_kernel, takes_groups
from .batches import CutBatch, SequenceShards
from .masks import CAUSAL, AttentionBlock, BatchMasks, Mask
from .scores import USUAL, Scores, accumulated, attention_with_dropout, block_by_hand, block_by_hand_backward

# Ring attention: keys and values go round the processes, and in backward their gradients with them.


_WIDTHS = 8
"""What the width of a head is a multiple of in kernels of accelerators."""


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

    def send_on(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Start to send a tensor to the next process; return a function that waits for that of the previous one."""
        count = len(self.ranks)
        to, source = self.ranks[(self.index + 1) % count], self.ranks[(self.index - 1) % count]
        sent = [tensor.contiguous()]
        received = torch.empty_like(sent[0])
        operations = [
            torch_dist.P2POp(torch_dist.isend, sent[0], to, self.group),
            torch_dist.P2POp(torch_dist.irecv, received, source, self.group),
        ]
        works = torch_dist.batch_isend_irecv(operations)

        def wait() -> Tensor:
            for work in works:
                work.wait()
            sent.clear()  # until here the memory must not be used for anything else
            return received

        return wait


def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask, scale: float | None, shards: SequenceShards, ring: Ring,
    scores: Scores = USUAL, of_keys: SequenceShards | None = None,
) -> Tensor:  # fmt: skip
    """Return the attention of this process's queries to the keys of all processes.

    Each block of queries and keys is computed by the kernel that torch chooses for this device, dtype and shape, while the next keys and values
    are on their way. Blocks that have a mask, and all if there is no kernel or scores are changed, are computed by hand, tile by
    tile. What is added up is in float32 at least.

    Args:
        query: (samples, heads, positions of this process, width).
        key, value: the same with a number of heads that divides that of ``query``; ``value`` may have another width.
        mask: which position attends to which. One that attends to none gives zeros.
        scale: factor of the scores; None: 1 / sqrt(width).
        shards: the division of the sequence.
        scores: what else is done to them, for the heads of ``query``; its positions are those of the whole sequence.
        of_keys: the division of the sequence of keys, if it is another one.

    Source: Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023; blocks are combined as
    in Dao et al., "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness", 2022.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    width = value.shape[-1]
    kernel = None
    if scores.are_products and (mask.alone is None or scores.sinks is not None):
        aligned = _aligned(query, key, value)
        kernel = attention_kernel(*aligned)
        query, key, value = aligned if kernel is not None else (query, key, value)
    blocks = _Blocks(mask, scale, shards, ring, kernel, scores, shards if of_keys is None else of_keys)
    found: Tensor = _RingAttention.apply(query, key, value, scores.sinks, scores.biases, blocks)
    return found if found.shape[-1] == width else found[..., :width]


def _aligned(*tensors: Tensor) -> list[Tensor]:
    """The tensors with one width that kernels take, padded by zeros, and with numbers of a head that follow each other."""
    width = -(-max(tensor.shape[-1] for tensor in tensors) // _WIDTHS) * _WIDTHS
    padded = (
        tensor if tensor.shape[-1] == width else functional.pad(tensor, (0, width - tensor.shape[-1]))
        for tensor in tensors
    )
    return [tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in padded]


@dataclass(frozen=True)
class _Blocks:
    """How the blocks of queries and keys are computed; a block's ``random`` is what its kernel's backward needs."""

    mask: Mask
    scale: float
    shards: SequenceShards
    ring: Ring
    kernel: AttentionKernel | None
    scores: Scores
    of_keys: SequenceShards

    def of_step(self, step: int, device: torch.device) -> Iterator[AttentionBlock]:
        """The blocks with the keys of the process ``step`` before."""
        blocks = self.mask.blocks if self.kernel is not None else self.mask.tiles
        return blocks(self.shards.spans(self.ring.index), self.of_keys.spans(self.source(step)), device)

    def passing(self, key: Tensor, value: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The keys and values of each step, in one message; the next ones are on their way until they are asked for."""
        widths, last = (key.shape[-1], value.shape[-1]), self.shards.count - 1
        together = torch.cat((key, value), -1) if last else key
        for _ in range(last):
            wait = self.ring.send_on(together)
            yield key, value
            together = wait()
            key, value = together.split(widths, -1)  # type: ignore[no-untyped-call]
        yield key, value

    def source(self, step: int) -> int:
        """The process ``step`` before."""
        return (self.ring.index - step) % self.shards.count

    def _positions(self, block: AttentionBlock, source: int) -> Tensor | None:
        """The positions of a block's keys, which process ``source`` has."""
        if self.scores.positions is None:
            return None
        return self.of_keys.cut(self.scores.positions, -1, source)[:, slice(*block.columns)]

    def forward(
        self, block: AttentionBlock, inputs: Sequence[Tensor], source: int
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Return the output of a block, the logarithms of the sums of its exponentials, and random numbers."""
        query, key, value = inputs
        given = block.of_rows(query), block.of_columns(key), block.of_columns(value)
        if self.kernel is not None and block.takes_kernel:
            return self.kernel.forward(*given, block.is_causal, self.scale)
        positions = self._positions(block, source)
        return *block_by_hand(*given, block, self.scale, self.scores, positions), ()

    def backward(
        self,
        block: AttentionBlock,
        gradient: Tensor,
        inputs: Sequence[Tensor],
        of_all: tuple[Tensor, Tensor],
        random: tuple[Tensor, ...],
        source: int,
        of_biases: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return a block's gradients of queries, keys and values, and add that of biases to ``of_biases``.

        ``of_all``: the output and the sums of all blocks.
        """
        query, key, value = inputs
        given = block.of_rows(gradient), block.of_rows(query), block.of_columns(key), block.of_columns(value)
        out, sums = (block.of_rows(tensor) for tensor in of_all)
        if self.kernel is not None and block.takes_kernel:
            return self.kernel.backward(*given, out, sums, random, block.is_causal, self.scale)
        positions = self._positions(block, source)
        return block_by_hand_backward(*given, out, sums, block, self.scale, self.scores, positions, of_biases)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        biases: Tensor | None,
        blocks: _Blocks,
    ) -> Tensor:
        with torch.autocast(query.device.type, enabled=False):
            combined = _Combined(query, value)
            random: tuple[Tensor, ...] = ()
            for step, pair in enumerate(blocks.passing(key, value)):
                for block in blocks.of_step(step, query.device):
                    out, sums, drawn = blocks.forward(block, (query, *pair), blocks.source(step))
                    combined.add(block, out, sums)
                    random = random or drawn
            out, sums = blocks.scores.with_sinks(combined.out, combined.sums)
            found = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, found, sums, *random)
        ctx.blocks = blocks
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, sums, *random = ctx.saved_tensors
        blocks: _Blocks = ctx.blocks
        with torch.autocast(query.device.type, enabled=False):
            if gradient.stride(-1) != 1:
                gradient = gradient.contiguous()
            widths, biases = (key.shape[-1], value.shape[-1]), blocks.scores.biases
            of_query, own = _Sum(query, query.shape[-1]), _Sum(key, sum(widths))
            of_biases = None if biases is None else torch.zeros_like(biases, dtype=accumulated(query))
            arriving: Callable[[], Tensor] | None = None
            for step, pair in enumerate(blocks.passing(key, value)):
                of_pair = _Sum(key, sum(widths)) if step else own
                for block in blocks.of_step(step, query.device):
                    inputs, of_all, source = (query, *pair), (out, sums), blocks.source(step)
                    found = blocks.backward(block, gradient, inputs, of_all, tuple(random), source, of_biases)
                    of_query.add(block.of_rows, found[0])
                    of_pair.add(block.of_columns, torch.cat(found[1:], -1))
                # Gradients follow their keys, a step behind: they are on their way under the next step's kernel.
                if step:
                    total = of_pair.total if arriving is None else arriving().add_(of_pair.total)
                    arriving = blocks.ring.send_on(total)
            of_both = own.total if arriving is None else arriving().add_(own.total)
            of_key, of_value = of_both.to(key.dtype).split(widths, -1)  # type: ignore[no-untyped-call]
            of_sinks = blocks.scores.gradient_of_sinks(gradient, out, sums)
            of_biases = None if biases is None or of_biases is None else of_biases.to(biases.dtype)
        return of_query.total.to(query.dtype), of_key, of_value, of_sinks, of_biases, None


class _Sum:
    """A sum of gradients of blocks of a tensor, or of several beside each other.

    Args:
        like: the tensor, or one of them.
        width: that of all.
    """

    def __init__(self, like: Tensor, width: int) -> None:
        self._shape, self._dtype, self._device = (*like.shape[:3], width), accumulated(like), like.device
        self._total: Tensor | None = None

    def add(self, view: Callable[[Tensor], Tensor], found: Tensor) -> None:
        """Add the gradient of what ``view`` gives of the tensor."""
        if self._total is None and found.shape == self._shape:
            self._total = found.to(self._dtype)
        else:
            view(self.total).add_(found)

    @property
    def total(self) -> Tensor:
        """The sum, zeros if there was none."""
        if self._total is None:
            self._total = torch.zeros(self._shape, dtype=self._dtype, device=self._device)
        return self._total


class _Combined:
    """Attention to several blocks of keys: their outputs weighed by the sums of their exponentials.

    Attributes:
        out, sums: the output, and the logarithms of the sums: -infinity for a query that attends to none.
    """

    def __init__(self, query: Tensor, value: Tensor) -> None:
        self._shape, self._device, self._dtype = (*query.shape[:3], value.shape[3]), query.device, accumulated(query)
        self._found: tuple[Tensor, Tensor] | None = None

    @property
    def out(self) -> Tensor:
        return self._both()[0]

    @property
    def sums(self) -> Tensor:
        return self._both()[1]

    def _both(self) -> tuple[Tensor, Tensor]:
        if self._found is None:
            out = torch.zeros(self._shape, dtype=self._dtype, device=self._device)
            self._found = out, torch.full(self._shape[:3], -torch.inf, dtype=self._dtype, device=self._device)
        return self._found

    def add(self, block: AttentionBlock, out: Tensor, sums: Tensor) -> None:
        """Add a block."""
        out = out.to(self._dtype)
        if self._found is None and out.shape == self._shape:
            self._found = out, sums
            return
        whole, before = block.of_rows(self.out), block.of_rows(self.sums)
        weight = torch.sigmoid(sums - before)
        if block.allowed is not True:  # some may have attended to none, here and before
            weight = torch.where(sums == -torch.inf, 0.0, weight)
        whole.lerp_(out, weight[..., None])
        torch.logaddexp(before, sums, out=before)


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
    scores: Scores = USUAL,
    of_keys: SequenceShards | None = None,
) -> Tensor:
    """Return the attention of this process's queries to the keys of all processes, by torch's own kernels.

    Documents and padding are computed as blocks without mask, where there is a kernel for it.

    Args:
        query: (samples, heads, positions of this process, width); the number of processes divides that of the heads.
        key, value: the same with a number of heads that divides that of ``query``.
        mask, scale, shards, of_keys: see ``ring_attention``.
        scores: the same for the heads that this process has of the whole sequence.
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
    query = _whole_sequence(query, shards, group)
    key, value = (_whole_sequence(tensor, shards if of_keys is None else of_keys, group) for tensor in (key, value))
    out = _whole_attention(query, key, value, mask, scale, dropout, scores)
    return _own_positions(out, shards, group)


def _whole_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask, scale: float | None, dropout: float, scores: Scores = USUAL
) -> Tensor:
    """Attention of all positions of a sequence to all of it or of another one, which this process has."""
    length, allowed = key.shape[2], None
    causal = mask.by_rule and mask.rule == CAUSAL
    if dropout and (mask.alone is not None or not scores.are_usual):
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        return attention_with_dropout(query, key, value, mask.dense(length, query.device), scale, scores, dropout)
    if (
        not scores.are_usual
        or mask.alone is not None
        or (
            not mask.by_rule
            and not dropout
            and mask.is_in_blocks
            and attention_kernel(*_aligned(query, key, value)) is not None
        )
    ):
        alone = SequenceShards(query.shape[2], 1, False), Ring(None, 0, [0])
        return ring_attention(query, key, value, mask, scale, *alone, scores, SequenceShards(length, 1, False))
    if not causal:
        allowed = mask.dense(length, query.device)
    groups = query.shape[1] != key.shape[1]
    if groups and not takes_groups(query, key, value, allowed, dropout, causal):
        groups, shared = False, query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(shared, 1) for tensor in (key, value))
    return scaled_dot_product_attention(
        query, key, value, attn_mask=allowed, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=groups
    )


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


class _Without(torch.autograd.Function):
    """What depends on each query alone, in the shape of attention to another sequence, whose gradients are zeros."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(query, key, value)
        return query.sum(-1, keepdim=True).expand(*query.shape[:-1], value.shape[-1]).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.zeros_like(tensor) for tensor in ctx.saved_tensors)


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
        length: number of positions of the batch of the forward that is running; None outside of updates and evaluations.
        encoder_length: that of the encoder's sequence; None: the model has one sequence.
        positions: of a model with two, where this process's positions are, of the encoder and of the decoder; else empty.
        documents, is_full: of that batch, see CutBatch.
        masks: of that forward.
        is_compared: the forward is compared with one process.
        has_documents: one that was compared kept several documents of a sequence apart, on some process.
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
        self.encoder_length: int | None = None
        self.positions: list[Tensor] = []
        self.documents: Tensor | None = None
        self.is_full = self.is_compared = self.has_documents = False
        self.masks = BatchMasks()

    def shards(self, length: int) -> SequenceShards:
        """Return the division of sequences of ``length`` positions."""
        return SequenceShards(length, self.count, self.kind == "ring" and length % (2 * self.count) == 0)

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Mask, scale: float | None, dropout: float, source: str,
        scores: Scores = USUAL,
    ) -> Tensor:  # fmt: skip
        """Return attention as ``scaled_dot_product_attention`` has it, (samples, heads, positions, width).

        Tensors may be DTensors of another mesh, such as that of tensor parallelism, sharded by heads.

        Raises:
            StrategyError: a request that is impossible here; the message begins with ``source``.
        """
        return self._attend(query, key, value, mask, scale, dropout, source, scores)

    def begin(self, batch: CutBatch) -> None:
        """Take what belongs to the forward of a batch."""
        self.length, self.documents, self.is_full = batch.shards.length, batch.documents, batch.is_full
        if batch.of_encoder is not None:
            self.encoder_length = batch.of_encoder.length
            lengths = self.encoder_length, self.length
            self.positions = [self.own(torch.arange(length, device=self.device)) for length in lengths]

    def separate_documents(self) -> None:
        """Note that a forward keeps documents apart.

        Raises:
            StrategyError: none did that was compared with one process.
        """
        if not (self.is_compared or self.has_documents):
            raise StrategyError(
                "batch: has several documents in a sequence, whose positions begin again, and the batch that strategy.cp compared with "
                "one process had none, so that nothing shows whether the model keeps them apart; let the first batch have some"
            )
        self.has_documents = True

    def end(self) -> None:
        """Let go of what belongs to the forwards of an update or evaluation."""
        self.length, self.documents, self.is_full, self.masks = None, None, False, BatchMasks()
        self.encoder_length, self.positions = None, []

    def stay_uncompiled(self) -> None:
        """Let a compiled model call this as it is: each of its messages and tiles would be compiled for itself."""
        self._attend = torch.compiler.disable(self._attend)  # type: ignore[method-assign, no-untyped-call]

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Mask, scale: float | None, dropout: float, source: str,
        scores: Scores,
    ) -> Tensor:  # fmt: skip
        self.calls += 1
        if isinstance(query, DTensor):
            return self._on_shards_of_heads(query, key, value, mask, scale, dropout, source, scores)
        own, others = query.shape[-2], key.shape[-2]
        length = self.length if mask.length is None else mask.length
        of_keys = own if length is None else length // self.count
        of_queries = of_keys if mask.queries is None else mask.queries // self.count
        if (own, others) != (of_queries, of_keys):
            of_both = "for both" if of_queries == of_keys else f"and {of_keys} of its other one"
            raise StrategyError(
                f"{source}: {own} queries and {others} keys, context parallelism needs the sequence's {of_queries} positions of this "
                f"process {of_both}"
            )
        for name, found in scores.by_head.items():
            if found is not None and len(found) != query.shape[1]:
                raise StrategyError(
                    f"{source}: has {len(found)} {name} of attention for {query.shape[1]} heads on a process"
                )
        if torch.is_autocast_enabled(query.device.type):
            dtype = torch.get_autocast_dtype(query.device.type)
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        self.dtype, self.device = query.dtype, query.device
        if self.is_apart and mask.queries is not None:
            return cast(Tensor, _Without.apply(query, key, value))
        if self.is_apart:
            of_heads = query.shape[1] // key.shape[1]
            key, value = (tensor.repeat_interleave(of_heads, 1) for tensor in (key, value))
            used = query.sum(-1, keepdim=True) + key.sum(-1, keepdim=True)
            if scores.sinks is not None:
                used = used + scores.sinks[:, None, None]
            return value + 0.0 * used
        shards, keys_shards = self.shards(own * self.count), self.shards(others * self.count)
        if self.kind == "ulysses":
            if query.shape[1] % self.count:
                raise StrategyError(
                    f'strategy.cp_kind: "ulysses" needs a number of heads that cp={self.count} divides, {source} has '
                    f'{query.shape[1]} on a process; choose "ring"'
                )
            own_heads = scores.of_heads(self.index, self.count)
            with self._locally():
                return ulysses_attention(
                    query, key, value, mask, scale, shards, self._group, dropout, own_heads, keys_shards
                )
        if dropout:
            raise StrategyError(
                f'strategy.cp_kind: "ring" has no dropout of attention, {source} asks for {dropout}; choose "ulysses", or '
                "set it to 0"
            )
        return ring_attention(query, key, value, mask, scale, shards, self._ring, scores, keys_shards)

    @contextmanager
    def _locally(self) -> Iterator[None]:
        self.is_local = True
        try:
            yield
        finally:
            self.is_local = False

    def _on_shards_of_heads(
        self,
        query: Any,
        key: Any,
        value: Any,
        mask: Mask,
        scale: float | None,
        dropout: float,
        source: str,
        scores: Scores,
    ) -> Tensor:
        mesh: DeviceMesh = query.device_mesh
        layout: Sequence[Placement] = [Replicate()] * mesh.ndim
        if mesh.ndim == 1 and query.placements == (Shard(1),) and key.shape[1] % mesh.size() == 0:
            layout = (Shard(1),)
        query, key, value = (one.redistribute(placements=layout).to_local() for one in (query, key, value))
        scores = scores.on_shards(mesh, [Shard(0) if each.is_shard() else each for each in layout])
        found = self(query, key, value, mask, scale, dropout, source, scores)
        return cast(Tensor, DTensor.from_local(found, mesh, layout, run_check=False))

    def own(self, whole: Tensor) -> Tensor:
        """Return what this process has of a tensor with all positions along its last dimension."""
        return self.shards(whole.shape[-1]).cut(whole, -1, self.index)
