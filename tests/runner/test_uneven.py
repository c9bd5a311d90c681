"""Two processes whose data differ in length train in step, end their epochs together, and evaluate every batch once."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset, default_collate

from flextrain.core.distributed import get_rank
from flextrain.testing import WorkerGroup

from .training import Samples, SaveEvery, Watch, make_runner

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("quick")]

BATCHES = (5, 7)
DDP = dict(type="DDPStrategy")
FSDP = dict(type="FSDPStrategy", wrap=["Linear"])
Result = dict[str, Any]


def batches(first: int, count: int) -> list[Any]:
    """Batches of two samples, the first of which is number ``first``."""
    samples = Samples(2 * (first + count))
    return [default_collate([samples[2 * i], samples[2 * i + 1]]) for i in range(first, first + count)]


class Stream(IterableDataset[Any]):
    """Samples of this process; those of rank 1 begin at 100."""

    def __init__(self, lengths: tuple[int, int], says: tuple[int, int] | None = None) -> None:
        self.lengths, self.says = lengths, says

    def __iter__(self) -> Iterator[Any]:
        samples, first = Samples(200), 100 * get_rank()
        yield from (samples[first + i] for i in range(2 * self.lengths[get_rank()]))

    def __len__(self) -> int:
        if self.says is None:
            raise TypeError
        return 2 * self.says[get_rank()]


class OwnBatches(DataLoader[Any]):
    """A loader of a class of its own."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        yield from super().__iter__()


class WithPlace:
    """Batches with a state that is behind the batch that was given last."""

    def __init__(self, lengths: tuple[int, int]) -> None:
        self.lengths, self.place, self.start = lengths, 0, 0

    def __iter__(self) -> Iterator[Any]:
        own = batches(50 * get_rank(), self.lengths[get_rank()])
        self.place, self.start = self.start, 0
        while self.place < len(own):
            self.place += 1
            yield own[self.place - 1]

    def __len__(self) -> int:
        return self.lengths[get_rank()]

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["place"]


def of_rank() -> Iterator[Any]:
    yield from batches(50 * get_rank(), BATCHES[get_rank()])


def source(kind: str, lengths: tuple[int, int] = BATCHES) -> Any:
    if kind == "function":
        return of_rank
    if kind == "sized state":
        return WithPlace(lengths)
    says = lengths if kind.startswith("sized") else None
    loader = OwnBatches if kind.endswith("own") else DataLoader
    return loader(Stream(lengths, says), batch_size=2)


def train(
    folder: str, kind: str, accumulate: int = 1, at: int | None = None, hooks: Any = (), **changes: Any
) -> Result:
    """What this process trained on, and what it said; ``at``: resumed from that iteration's checkpoint."""
    watch = Watch()
    if not kind.startswith("sized"):
        changes.setdefault("train_cfg", dict(by_epoch=False, max_iters=8))
    options = dict(
        train_dataloader=source(kind),
        optim_wrapper=dict(optimizer=dict(type="AdamW", lr=0.02), accumulative_counts=accumulate),
        custom_hooks=[watch, *hooks],
        log_level="WARNING",
    )
    if at is not None:
        options |= dict(load_from=f"{folder}/iter_{at}", resume=True)
    runner = make_runner(folder, **options | changes)
    place: tuple[Any, ...] = ()
    with lines() as said:
        try:
            runner.train()
            place = (runner.epoch, runner.iter, runner.max_iters)
        finally:
            runner.strategy.teardown()
    return {
        "trained": [[i % 100 for i in update] for update in watch.trained],
        "losses": [float(loss) for loss in watch.losses],
        "place": place,
        "said": said,
    }


@contextmanager
def lines() -> Iterator[list[str]]:
    """What is logged by this process from now on."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("flextrain")
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)


def updates(accumulate: int, epochs: int) -> list[list[int]]:
    """Five batches of two samples in every epoch, on both processes alike."""
    size = 2 * accumulate
    return [list(range(start, min(start + size, 10))) for start in range(0, 10, size)] * epochs


@pytest.mark.parametrize("strategy", [DDP, pytest.param(FSDP, marks=pytest.mark.slow)], ids=["ddp", "fsdp"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", ["sized", "stream", "sized own", "function", "sized state"])
def test_epochs_end_together(
    kind: str, accumulate: int, strategy: dict[str, Any], tmp_path: Path, workers2: WorkerGroup
) -> None:
    options: dict[str, Any] = dict(accumulate=accumulate, strategy=strategy)
    if not kind.startswith("sized"):
        options["train_cfg"] = dict(by_epoch=False, max_iters=8)
    expected = updates(accumulate, 3)[: 8 if not kind.startswith("sized") else None]
    parts = workers2.run(train, str(tmp_path), kind, hooks=[SaveEvery()], **options)
    assert [part["trained"] for part in parts] == [expected, expected]
    after = -(-5 // accumulate)
    said = [line for line in parts[0]["said"] if "ended there for all" in line]
    assert said == [
        f"train_dataloader: 1 of 2 processes had no more batches after {after} iterations of the epoch, which ended there "
        "for all; what the others have left is left out, in every epoch"
    ]
    if kind.startswith("sized"):
        assert parts[0]["place"] == parts[1]["place"] == (3, 3 * after, 3 * after)
    for at in (1, after, after + 2):
        again = workers2.run(train, str(tmp_path), kind, at=at, **options)
        assert [part["trained"] for part in again] == [expected[at:], expected[at:]], f"resumed after {at}"
        assert [part["losses"] for part in again] == [part["losses"][at:] for part in parts], f"resumed after {at}"


def test_an_epoch_that_was_ended_is_not_gone_on_with(tmp_path: Path, workers2: WorkerGroup) -> None:
    """The state of the longer loader, saved when the epoch is over, stands before what was left out."""
    hooks = dict(default_hooks=dict(checkpoint=dict(type="CheckpointHook", interval=1)))
    parts = workers2.run(train, str(tmp_path), "sized state", **hooks)
    again = workers2.run(train, str(tmp_path), "sized state", load_from=str(tmp_path / "epoch_2"), resume=True)
    assert [part["trained"] for part in again] == [part["trained"][10:] for part in parts]
    assert len(again[0]["trained"]) == 5
