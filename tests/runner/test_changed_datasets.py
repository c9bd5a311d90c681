"""Hooks that change a dataset between epochs, as those that end an augmentation: also workers that are kept see it."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from flextrain import ConfigError
from flextrain.runner.data.dataloaders import TrainData

from .training import At, Samples, built_loader, log_lines, make_runner, validation


class Crop:
    def __init__(self, size: int) -> None:
        self.size = size


class Augmented(Dataset[Any]):
    """Samples that tell what they were made with, and by which process."""

    def __init__(self) -> None:
        self.records = [{f"corner {number}": number for number in range(30)} for _ in range(1000)]
        self.mosaic, self.steps, self.options = True, [Crop(8), Crop(6)], {"scale": 2}
        self.turns = [*range(1000)]
        self.weights, self.noise, self.epoch = torch.ones(3), random.Random(3), 0
        self.names = [f"image {number}" for number in range(1000)]
        self.boxes, self.labels = [[number] for number in range(1000)], np.zeros(4)
        with torch.inference_mode():
            self.means = torch.zeros(2)
        self.logger, self.module, self.beside = logging.getLogger("a dataset"), random, TrainData([[1]], 1, 0)

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.order = epoch, [*range(epoch)]
        random.Random(epoch).shuffle(self.turns)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        self.noise.random()
        made = self.mosaic, [step.size for step in self.steps], self.options["scale"], float(self.weights.sum())
        inner = self.names[0], self.names[77], self.boxes[500][0], int(self.labels[2])
        return {"made": [*made, *inner], "turn": self.turns[0], "by": os.getpid()}


class Stream(IterableDataset[Any]):
    def __init__(self) -> None:
        self.mosaic = True

    def __iter__(self) -> Iterator[Any]:
        yield from ({"made": [self.mosaic], "by": os.getpid()} for _ in range(4))


def end_mosaic(loader: Any) -> None:
    loader.dataset.mosaic = False


def smaller(loader: Any) -> None:
    loader.dataset.steps[1].size = 5


def another_step(loader: Any) -> None:
    loader.dataset.steps[0] = Crop(9)


def one_step_less(loader: Any) -> None:
    del loader.dataset.steps[1]


def another_option(loader: Any) -> None:
    loader.dataset.options["scale"] = 3


def other_weights(loader: Any) -> None:
    loader.dataset.weights.mul_(2)


def other_names(loader: Any) -> None:
    loader.dataset.names = ["another image"] * 1000


def another_name(loader: Any) -> None:
    loader.dataset.names[77] = "another image"


def another_box(loader: Any) -> None:
    for box in loader.dataset.boxes:
        box[0] += 1


def another_label(loader: Any) -> None:
    loader.dataset.labels[2] = 1


def another_dataset(loader: Any) -> None:
    """As MMDetection's PipelineSwitchHook opens a loader."""
    loader._DataLoader__initialized = False
    loader.dataset = Augmented()
    loader.dataset.mosaic = False
    loader._iterator = None
    loader._DataLoader__initialized = True


def another_collate(loader: Any) -> None:
    loader.collate_fn = marked


def marked(samples: list[Any]) -> list[Any]:
    return [{**sample, "made": [*sample["made"], "marked"]} for sample in samples]


CHANGES = [
    end_mosaic, smaller, another_step, one_step_less, another_option, other_weights, other_names, another_name, another_box,
    another_label, another_dataset, another_collate,
]  # fmt: skip


def first_samples(dataset: Any, workers: int, change: Callable[[Any], None]) -> list[dict[str, Any]]:
    """The first sample of each of three epochs, with a change after the first one."""
    loader: Any = DataLoader(
        dataset, batch_size=2, num_workers=workers, persistent_workers=workers > 0, collate_fn=list
    )
    loader = built_loader(loader)
    data, found = TrainData(loader, accumulate=1, seed=0), []
    for epoch in range(3):
        samples = [sample for window in data.windows(epoch) for batch in window for sample in batch]
        found.append(samples[0])
        if epoch == 0:
            change(loader)
    data.close()
    return found


@pytest.mark.processes
@pytest.mark.parametrize("change", CHANGES)
def test_workers_that_are_kept_see_a_change(caplog: pytest.LogCaptureFixture, change: Callable[[Any], None]) -> None:
    alone = first_samples(Augmented(), 0, change)
    expected = [sample["made"] for sample in alone]
    caplog.set_level(logging.INFO, "flextrain")
    with log_lines(logging.INFO) as lines:
        first, second, third = first_samples(Augmented(), 1, change)
    assert [first["made"], second["made"], third["made"]] == expected
    assert expected[0] != expected[1] == expected[2]
    # Which set_epoch shuffles in place.
    assert [first["turn"], second["turn"], third["turn"]] == [sample["turn"] for sample in alone]
    assert first["by"] != second["by"] == third["by"]
    (line,) = [line for line in lines if "in spite of persistent_workers" in line]
    assert line.startswith(("dataset", "collate_fn")), line


@pytest.mark.processes
def test_workers_of_a_stream_too() -> None:
    first, second, third = first_samples(Stream(), 1, end_mosaic)
    assert [first["made"], second["made"], third["made"]] == [[True], [False], [False]]
    assert first["by"] != second["by"] == third["by"]


@pytest.mark.processes
def test_they_are_kept_where_nothing_has_changed() -> None:
    def look(loader: Any) -> None:
        loader.dataset.logger.debug("is looked at")
        loader.dataset.logger.warning("is looked at")
        loader.dataset.beside.seed = 7  # of the library

    assert len({sample["by"] for sample in first_samples(Augmented(), 1, look)}) == 1


def another_loader(runner: Any) -> None:
    loop = runner.train_loop if runner.epoch == 1 else runner.val_loop
    loop.dataloader = DataLoader(Samples(4), batch_size=2)


@pytest.mark.parametrize(("epoch", "said"), [(1, "EpochBasedTrainLoop.dataloader"), (2, "ValLoop.dataloader")])
def test_another_loader_is_refused(tmp_path: Path, epoch: int, said: str) -> None:
    runner = make_runner(
        tmp_path,
        custom_hooks=[At("before_train_epoch", lambda runner: runner.epoch == epoch and another_loader(runner))],
        **validation(),
    )
    with pytest.raises(ConfigError, match=f"^{said}: was replaced by another DataLoader after set-up"):
        runner.train()


def test_a_hook_may_validate_more_often(tmp_path: Path) -> None:
    validated = []

    def from_now_on(runner: Any) -> None:
        if runner.epoch == 2:
            runner.train_loop.val_interval = 1

    runner = make_runner(
        tmp_path,
        train_cfg=dict(by_epoch=True, max_epochs=6, val_interval=4),
        custom_hooks=[
            At("before_train_epoch", from_now_on),
            At("before_val_epoch", lambda r: validated.append(r.epoch)),
        ],
        **validation(),
    )
    runner.train()
    assert validated[-4:] == [3, 4, 5, 6]
