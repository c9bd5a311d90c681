"""A small GPT on bytes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flextrain import BaseModel

VOCABULARY = 256


class Block(nn.Module):
    """A pre-norm transformer block: attention and a two-layer network."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, length, dim))
        y: Tensor = x + self.mlp(self.norm2(x))
        return y


class SmallGPT(BaseModel):
    """Logits of the next byte, or the loss, from at most ``context`` bytes.

    Args:
        layers: number of blocks.
        dim: width; a multiple of ``heads``.
        heads: number of attention heads.
        context: largest number of bytes in a sequence.
    """

    def __init__(self, layers: int = 2, dim: int = 128, heads: int = 4, context: int = 64) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, dim)
        self.positions = nn.Embedding(context, dim)
        # In a ModuleList, where strategy=dict(type="fsdp", wrap="blocks") finds them.
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY)

    def forward(self, inputs: Tensor, targets: Tensor, mode: str = "tensor") -> Any:
        x = self.tokens(inputs) + self.positions(torch.arange(inputs.shape[1], device=inputs.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()  # in bfloat16 they would have too few digits for a loss
        if mode == "tensor":
            return logits
        losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none").mean(dim=1)
        return {"loss": losses.mean()} if mode == "loss" else losses
