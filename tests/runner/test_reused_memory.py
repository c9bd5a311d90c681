"""Data that give the same memory again with the next batch in it: every batch is used as it was given."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from flextrain import FlexibleRunner
from flextrain.core.base.errors import ConfigError
from flextrain.runner.data.lockstep import HeldBatches
from flextrain.testing import WorkerGroup

ROWS = 12


class Reusing:
    """Batches of two numbers in one tensor; their number is not known beforehand, so that processes agree on each."""

    def __init__(self, rank: int = 0) -> None:
        self.buffer, self.constant, self.rank = torch.zeros(2, 1), torch.ones(1), rank

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number in range(ROWS):
            self.buffer.fill_(100 * self.rank + number)
            yield {"x": self.buffer, "constant": self.constant}


class Seeing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)
        self.seen: list[float] = []
        self.evaluated: list[float] = []

    def forward(self, x: Tensor, constant: Tensor, mode: str = "loss") -> Any:
        (self.seen if mode == "loss" else self.evaluated).append(x[0].item())
        return {"loss": self.linear(x).mean()} if mode == "loss" else self.linear(x)


def seen(folder: Path, accumulate: int, strategy: str = "SingleDeviceStrategy") -> tuple[list[float], list[float]]:
    """The numbers that a model has seen in training and validation, of this process."""
    rank = int(os.environ.get("RANK", "0"))
    model = Seeing()
    runner = FlexibleRunner(
        model=model,
        work_dir=folder,
        train_dataloader=dict(loader=Reusing(rank), shard=False),
        val_dataloader=dict(loader=Reusing(rank), shard=False),
        val_evaluator=dict(type="DumpResults", out_file_path=str(folder / "results.pkl")),
        strategy=dict(type=strategy),
        train_cfg=dict(by_epoch=False, max_iters=ROWS // accumulate),
        val_cfg={},
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.0), accumulative_counts=accumulate),
        default_hooks=dict(checkpoint=None, logger=None),
    )
    runner.train()
    return model.seen, model.evaluated


@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_micro_batches_of_an_update(tmp_path: Path, accumulate: int) -> None:
    assert seen(tmp_path, accumulate)[0] == [float(number) for number in range(ROWS)]


@pytest.mark.distributed
@pytest.mark.parametrize("accumulate", [1, 3])
def test_what_processes_read_ahead(workers2: WorkerGroup, tmp_path: Path, accumulate: int) -> None:
    for rank, found in enumerate(workers2.run(seen, tmp_path, accumulate, "DDPStrategy")):
        expected = [float(100 * rank + number) for number in range(ROWS)]
        assert found == (expected, expected)


def test_constants_and_fresh_batches_are_given_as_they_are() -> None:
    constant = torch.ones(3)
    batches = [{"x": torch.full((2,), float(number)), "constant": constant} for number in range(6)]
    given = [*HeldBatches("train_dataloader", 3).of(batches)]
    assert [each is batch for each, batch in zip(given, batches, strict=True)] == [False, False, True, True, True, True]
    assert all(torch.equal(each["x"], batch["x"]) for each, batch in zip(given, batches, strict=True))


def test_memory_that_is_not_a_tensors() -> None:
    buffer = np.zeros(2)

    def batches() -> Iterator[Any]:
        for number in range(3):
            buffer[:] = number
            yield {"x": buffer}

    with pytest.raises(ConfigError, match="^train_dataloader: writes into a batch that it gave before, and 2 batches"):
        [*HeldBatches("train_dataloader", 2).of(batches())]
