"""Datasets."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset

from flextrain import DATASETS

CLASSES = ("empty", "row", "column", "cross")


@DATASETS.register_module()
class Lines(Dataset[dict[str, Tensor]]):
    """Noisy pictures of shape (1, 16, 16), each with a bright row, a bright column, both or none.

    Args:
        size: number of pictures.
        seed: seed of the pictures.
    """

    metainfo = {"classes": CLASSES}

    def __init__(self, size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.images = 0.5 * torch.randn(size, 1, 16, 16, generator=generator)
        self.labels = torch.randint(len(CLASSES), (size,), generator=generator)
        for image, label in zip(self.images[:, 0], self.labels.tolist(), strict=True):
            row, column = torch.randint(2, 14, (2,), generator=generator).tolist()
            if CLASSES[label] in ("row", "cross"):
                image[row] += 1
            if CLASSES[label] in ("column", "cross"):
                image[:, column] += 1

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"inputs": self.images[index], "labels": self.labels[index]}
