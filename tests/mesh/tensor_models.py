"""Models with what tensor parallelism may get wrong: registered as ``MODELS`` of this folder."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from .models import LENGTH, VOCABULARY, Plain, PlainBlock, register


class ChunkedBlock(nn.Module):
    """Attention as many write it: a joint projection cut by ``chunk`` or ``split``, dropout of probabilities."""

    def __init__(self, width: int, heads: int, dropout: float, *, split: bool = False) -> None:
        super().__init__()
        self.heads, self.split, self.dropout = heads, split, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(dropout), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        joint = self.qkv(self.norm1(x))
        parts = joint.split(width, dim=2) if self.split else joint.chunk(3, dim=-1)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        dropped = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropped)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


@dataclass(frozen=True)
class Scored:
    """What no container of torch is."""

    loss: Tensor
    logits: Tensor


class SilentBlock(ChunkedBlock):
    """Its attention shows in no result before the first update."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__(width, heads, dropout)
        nn.init.zeros_(self.out.weight)


class SharedNormBlock(PlainBlock):
    """Heads that share a scale: right on some heads, whose gradients of it are not those of all."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__(width, heads, dropout)
        self.of_queries = nn.LayerNorm(self.head)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (f(h).unflatten(-1, (-1, self.head)).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(self.of_queries(q), k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class TrainingBlock(PlainBlock):
    """Reads a whole width, in training only."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.gelu(self.up(self.norm2(x)))
        if self.training:
            hidden = hidden / hidden.norm(dim=-1, keepdim=True)
        return super().forward(x) + self.down(hidden)


class Remembering(nn.Module):
    """Keeps statistics of features that are divided in a buffer that is not, and adds the size of its weights to its loss."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(VOCABULARY, 8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.head = nn.Linear(8, VOCABULARY)
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.up(self.embed(input_ids)))
        with torch.no_grad():
            self.mean.mul_(0.9).add_(hidden.mean((0, 1)), alpha=0.1)
        logits = self.head(self.down(hidden - self.mean))
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        for weight in (self.up.weight, self.down.weight):
            loss += 0.1 * weight.norm()
        return {"loss": loss}


class Odd(nn.Module):
    """Widths that two does not divide, a parameter without dimension, one that two modules look up, buffers, smoothed classes."""

    scale: Tensor
    weights: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.again = nn.Embedding(VOCABULARY, 10), nn.Embedding(VOCABULARY, 10)
        self.again.weight = self.embed.weight
        self.up, self.gate, self.down = nn.Linear(10, 7), nn.Linear(10, 7), nn.Linear(7, 10)
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 7))
        self.register_buffer("weights", torch.linspace(0.5, 1.5, VOCABULARY), persistent=False)
        self.norm, self.head = nn.LayerNorm(10), nn.Linear(10, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor | Scored:
        x = self.embed(input_ids) + self.again(input_ids.flip(1)) ** 2
        x = x + self.down(functional.silu(self.gate(x)) * self.up(x) * self.scale)
        logits: Tensor = self.head(self.norm(x)) / self.temperature
        if labels is None:
            return logits
        smoothed = functional.cross_entropy(
            logits.transpose(1, 2), labels, self.weights, ignore_index=3, label_smoothing=0.1, reduction="none"
        )
        return Scored(smoothed.mean() + functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits)


class Attending(nn.Module):
    """torch's own attention over another sequence than its queries', and its whole encoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCABULARY, 16), nn.Embedding(LENGTH, 16)
        self.cross = nn.MultiheadAttention(16, 4, batch_first=True, bias=False)
        self.layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, bias=False)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor | dict[str, Tensor]:
        x = self.embed(input_ids) + self.position(torch.arange(input_ids.shape[1], device=input_ids.device))
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device, dtype=x.dtype)
        x = self.layer(x, src_mask=mask)
        logits: Tensor = self.head(x + self.cross(x, x.flip(1), x, need_weights=False)[0])
        return logits if labels is None else {"loss": functional.cross_entropy(logits.mT, labels)}


register(
    chunked=functools.partial(Plain, ChunkedBlock),
    silent=functools.partial(Plain, SilentBlock),
    shared_norm=functools.partial(Plain, SharedNormBlock),
    in_training=functools.partial(Plain, TrainingBlock),
    split=functools.partial(Plain, functools.partial(ChunkedBlock, split=True)),
    dropping=functools.partial(Plain, dropout=0.3),
    dropping_heads=functools.partial(Plain, ChunkedBlock, dropout=0.3),
    odd=Odd,
    remembering=Remembering,
    attending=Attending,
)
