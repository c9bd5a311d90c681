"""Ulysses: an all-to-all gives each process some of the heads with the whole sequence, and another one takes them back."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.distributed as torch_dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention

from .masks import CAUSAL, FULL, Mask
from .sequence import SequenceShards


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
