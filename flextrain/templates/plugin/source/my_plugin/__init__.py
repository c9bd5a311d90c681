"""A source of data: rows of a file of comma-separated numbers, of which the last is what is learned."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset


class MyPluginDataset(Dataset):
    """Replace what it reads. Shuffling, division over processes and resuming are flextrain's; docs/how_to/custom_data.md.

    Args:
        path: the file; every row has equally many numbers.
    """

    def __init__(self, path: str) -> None:
        lines = Path(path).read_text().split()
        self.rows = torch.tensor([[float(number) for number in line.split(",")] for line in lines])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.rows[index, :-1], "y": self.rows[index, -1:]}
