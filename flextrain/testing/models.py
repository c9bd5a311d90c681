"""Small models for tests of strategies, with tied, frozen, odd-sized and scalar parameters, and buffers.

Each takes a batch as keyword arguments and has a ``mode`` like MMEngine's models; ``sample(count, seed)`` draws data for it.
No model has dropout, so that a training run depends only on weights and data. No model has an activation with a kink such
as ReLU, where a rounding error can change a whole gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Batch = dict[str, Tensor]


class SmallModel(nn.Module):
    """A classifier: subclasses compute logits; this class computes the mean cross-entropy and its number of terms."""

    num_classes = 5

    def forward(self, x: Tensor, y: Tensor, mode: str = "loss") -> Any:
        """``{"loss": ...}``, the predicted classes and targets, or the logits, by ``mode``."""
        logits = self.logits(x)
        if mode == "loss":
            return {"loss": functional.cross_entropy(logits.flatten(0, -2), y.flatten())}
        return logits if mode == "tensor" else (logits.argmax(-1), y)

    def logits(self, x: Tensor) -> Tensor:
        """Unnormalised log-probabilities, (..., num_classes)."""
        raise NotImplementedError

    def loss_weight(self, data_batch: Batch) -> Tensor:
        """The number of terms in the mean loss of ``forward``; targets of -100 do not count."""
        return (data_batch["y"] != -100).sum().float()

    @classmethod
    def sample(cls, count: int, seed: int) -> Batch:
        """``count`` samples whose classes follow a learnable rule."""
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(count, 6, generator=generator)
        return {"x": x, "y": (x.sum(1) * 2).long() % cls.num_classes}


class Mlp(SmallModel):
    """Three linear layers, two of them of odd sizes, and a scalar parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 13), nn.Tanh(), nn.Linear(13, 11), nn.Tanh(), nn.Linear(11, self.num_classes)
        )
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def logits(self, x: Tensor) -> Tensor:
        """See SmallModel; x is (batch, 6)."""
        return self.layers(x) * self.temperature  # type: ignore[no-any-return]


class ConvNet(SmallModel):
    """Two convolutions with batch normalisation in evaluation mode, as in fine-tuning."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.GELU(),
            nn.Conv2d(6, 7, 3, padding=1), nn.BatchNorm2d(7), nn.GELU(), nn.AdaptiveAvgPool2d(2),
        )  # fmt: skip
        self.head = nn.Linear(28, self.num_classes)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean = torch.linspace(-0.2, 0.2, module.num_features)
                module.running_var = torch.linspace(0.5, 1.5, module.num_features)

    def train(self, mode: bool = True) -> ConvNet:
        """Set training mode, except for batch normalisation."""
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self

    def logits(self, x: Tensor) -> Tensor:
        """See SmallModel; x is (batch, 1, 8, 8)."""
        return self.head(self.features(x).flatten(1))  # type: ignore[no-any-return]

    @classmethod
    def sample(cls, count: int, seed: int) -> Batch:
        """Noise with a bright spot; the class is the position of the spot."""
        generator = torch.Generator().manual_seed(seed)
        y = torch.randint(0, cls.num_classes, (count,), generator=generator)
        x = torch.randn(count, 1, 8, 8, generator=generator) * 0.5
        x[torch.arange(count), 0, y, y] += 3.0
        return {"x": x, "y": y}


class Block(nn.Module):
    """Pre-norm attention and a two-layer perceptron."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        # No bias: softmax cancels the bias of the keys. Its gradient would be rounding noise, which Adam scales to full steps.
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) to the same shape."""
        batch, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class TinyTransformer(SmallModel):
    """A causal language model of two blocks whose output layer shares its weight with the token embedding."""

    num_classes = 17
    length = 5

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.tokens = nn.Embedding(self.num_classes, width)
        self.positions = nn.Embedding(self.length, width)
        self.blocks = nn.ModuleList(Block(width, num_heads=2) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, self.num_classes, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("order", torch.arange(self.length), persistent=False)

    def logits(self, x: Tensor) -> Tensor:
        """See SmallModel; x is (batch, length) token numbers."""
        hidden = self.tokens(x) + self.positions(self.order)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))  # type: ignore[no-any-return]

    @classmethod
    def sample(cls, count: int, seed: int) -> Batch:
        """Arithmetic sequences modulo the vocabulary, and their next tokens."""
        generator = torch.Generator().manual_seed(seed)
        start = torch.randint(0, cls.num_classes, (count, 1), generator=generator)
        step = torch.randint(1, 4, (count, 1), generator=generator)
        sequence = (start + step * torch.arange(cls.length + 1)) % cls.num_classes
        return {"x": sequence[:, :-1].contiguous(), "y": sequence[:, 1:].contiguous()}


class HalfFrozen(SmallModel):
    """A net with every second layer frozen; it counts its training batches in a persistent buffer."""

    num_batches: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(6, 12).requires_grad_(False)
        self.trained = nn.Linear(12, 12)
        self.frozen_too = nn.Linear(12, 9).requires_grad_(False)
        self.head = nn.Linear(9, self.num_classes)
        self.register_buffer("num_batches", torch.zeros((), dtype=torch.long))

    def logits(self, x: Tensor) -> Tensor:
        """See SmallModel; x is (batch, 6)."""
        if self.training and torch.is_grad_enabled():
            self.num_batches += 1
        hidden = torch.tanh(self.trained(torch.tanh(self.frozen(x))))
        return self.head(torch.tanh(self.frozen_too(hidden)))  # type: ignore[no-any-return]


class ConformanceNet(TinyTransformer):
    """The model of the conformance kit: a tied weight, a frozen layer, two buffers, and an input that makes gradients overflow.

    ``strain`` in the batch multiplies the first row of ``probe`` in the loss. Zero does not change the loss; infinity
    gives only that row a gradient that is not finite.
    """

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(12, 12).requires_grad_(False)
        self.probe = nn.Parameter(torch.full((4, 3), 0.5))
        self.register_buffer("scale", torch.tensor(0.1))

    def forward(self, x: Tensor, y: Tensor, mode: str = "loss", strain: Tensor | None = None) -> Any:
        """See SmallModel; ``strain`` is a scalar, or one number per sample."""
        result = super().forward(x, y, mode)
        if mode == "loss":
            # The parameter is used in every batch, so that no strategy has to find unused parameters.
            result["loss"] = result["loss"] + (self.probe**2).mean()
            if strain is not None:
                result["loss"] = result["loss"] + (self.probe[0] * strain.mean()).sum()
        return result

    def logits(self, x: Tensor) -> Tensor:
        """See SmallModel."""
        hidden = self.tokens(x) + self.positions(self.order)
        hidden = hidden + self.scale * self.frozen(hidden)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))  # type: ignore[no-any-return]


class PartlyUsed(TinyTransformer):
    """A layer that no batch uses, and one that only samples use whose row of ``more`` is not zero: maybe none of a process's."""

    def __init__(self) -> None:
        super().__init__()
        self.spare, self.extra = nn.Linear(3, 4), nn.Linear(3, self.num_classes)

    def forward(self, x: Tensor, y: Tensor, mode: str = "loss", more: Tensor | None = None) -> Any:
        """See SmallModel; ``more`` is (batch, 1, 3)."""
        logits = self.logits(x)
        used = None if more is None else more.flatten(1).any(1)
        if more is not None and used is not None and used.any():
            logits = logits + self.extra(more) * used[:, None, None]
        if mode == "loss":
            return {"loss": functional.cross_entropy(logits.flatten(0, -2), y.flatten())}
        return logits if mode == "tensor" else (logits.argmax(-1), y)
