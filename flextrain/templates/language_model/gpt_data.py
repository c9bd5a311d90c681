"""Text as sequences of bytes, and the metric of its prediction."""

from __future__ import annotations

import math
import pydoc_data.topics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from flextrain import BaseMetric


class Bytes(Dataset[tuple[Tensor, Tensor]]):
    """Sequences of ``context`` bytes, each with the bytes that follow; the last sixteenth of the text is for validation.

    Args:
        context: bytes in a sequence.
        train: the first part of the text; False: the rest.
        path: a file with the text; None: what help() says about Python's topics, which comes with Python.
    """

    def __init__(self, context: int, train: bool, path: str | None = None) -> None:
        text = "\n\n".join(pydoc_data.topics.topics.values()).encode() if path is None else Path(path).read_bytes()
        split = len(text) * 15 // 16
        self.text = torch.frombuffer(bytearray(text[:split] if train else text[split:]), dtype=torch.uint8)
        self.context = context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.context
        sequence = self.text[start : start + self.context + 1].long()
        return sequence[:-1], sequence[1:]


class BytesLoss(BaseMetric):
    """The mean loss, also in bits per byte: the size that an ideal compressor with this model would reach."""

    def process(self, data_batch: Any, data_samples: Tensor) -> None:
        self.results.extend(data_samples.tolist())

    def compute_metrics(self, results: list[float]) -> dict[str, float]:
        loss = sum(results) / len(results)
        return {"loss": loss, "bits_per_byte": loss / math.log(2)}
