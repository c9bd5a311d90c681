"""Models that draw random numbers in their forward, and what they draw under a pipeline, written for one device."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from flextrain.strategies.mesh.pipeline.stages import Streams

from ..device import DEVICE
from .models import VOCABULARY, PlainBlock

WIDTH, CHANNELS = 32, 8


class Jitter(nn.Module):
    """Multiplies by a number of Python's generator, in training."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + 0.1 * random.random()) if self.training else x


class Noise(nn.Module):
    """Learns to tell the noise that its forward adds to the batch, at a random time, from a noisy batch.

    Args:
        dropout: in the embedding, before the layers, in them, and after them.
        repeats: compute layers again in backward.
        on_host: draw from Python's and NumPy's generator, too.
        layers: their number.
    """

    def __init__(self, dropout: float = 0.0, repeats: bool = False, on_host: bool = False, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Dropout(dropout))
        if on_host:
            self.embed.append(Jitter())
        self.time = nn.Linear(1, WIDTH)
        self.drop = nn.Dropout(dropout)
        self.layers = nn.ModuleList(PlainBlock(WIDTH, 4, dropout) for _ in range(layers))
        self.head = nn.Linear(WIDTH, CHANNELS)
        self.repeats, self.on_host = repeats, on_host
        self.seen: list[Tensor] = []

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        clean = functional.one_hot(input_ids % CHANNELS, CHANNELS).to(torch.get_default_dtype())
        embedded = self.embed(input_ids)
        time = torch.randint(0, 10, (len(clean), 1, 1)).to(clean) / 10
        noise = torch.randn_like(clean)
        if self.on_host:
            noise = noise * random.random() + float(np.random.rand())
        noise = noise + torch.randn_like(embedded)[..., :CHANNELS]  # of the shape of what another stage computes
        self.seen.append(noise)
        x = self.drop(embedded + self.time(time) + functional.pad(clean * (1 - time) + noise * time, (0, 24)))
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.repeats else layer(x)
        return {"loss": functional.mse_loss(self.drop(self.head(x)), noise)}


class OnOneDevice(Noise):
    """Draws on one device what a pipeline draws with a layer on each stage: masks have streams of their own."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "repeats": False})
        self.streams = streams = Streams(torch.device(DEVICE))
        streams.on_host = self.on_host
        self.embed.register_forward_pre_hook(lambda *_: self.training and streams.enter_part())
        self.embed.register_forward_hook(lambda *_: self.training and streams.leave_part())
        self.layers[0].register_forward_pre_hook(lambda *_: self.training and streams.leave_shared())
        for stage, layer in enumerate(self.layers):
            layer.register_forward_pre_hook(lambda _, __, stage=stage: self.training and streams.enter_layers(stage))

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        try:
            return super().forward(input_ids, labels)
        finally:
            self.streams.end()
