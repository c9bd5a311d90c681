"""Two processes whose data differ in length train in step, end their epochs together, and evaluate every batch once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, SubsetRandomSampler, default_collate

from flextrain.core.comm.collectives import get_rank
from flextrain.testing import WorkerError, WorkerGroup

from .training import Accuracy, Samples, SaveEvery, Watch, log_lines, make_runner

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("quick")]

BATCHES = (5, 7)
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
    says = lengths if kind.startswith("sized") else None
    kinds = {"function": lambda: of_rank, "sized state": lambda: WithPlace(lengths)}
    loader = OwnBatches if kind.endswith("own") else DataLoader
    given = kinds.get(kind, lambda: loader(Stream(lengths, says), batch_size=2))()
    return dict(loader=given, shard=False)


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
    with log_lines() as said:
        try:
            runner.train()
            place = (runner.epoch, runner.iter, runner.max_iters)
        finally:
            runner.strategy.leave()
    return {
        "trained": [[i % 100 for i in update] for update in watch.trained],
        "losses": [float(loss) for loss in watch.losses],
        "place": place,
        "said": said,
    }


def updates(accumulate: int, epochs: int) -> list[list[int]]:
    """Five batches of two samples in every epoch, on both processes alike."""
    size = 2 * accumulate
    return [list(range(start, min(start + size, 10))) for start in range(0, 10, size)] * epochs


USUAL = {
    *product(("sized", "function", "sized state"), (1, 2), ("DDPStrategy",)),
    *product(("sized", "sized own"), (2,), ("FSDPStrategy",)),
}


@pytest.mark.parametrize(
    "kind, accumulate, strategy",
    [
        pytest.param(*case, marks=() if case in USUAL else pytest.mark.full)
        for case in product(
            ("sized", "stream", "sized own", "function", "sized state"), (1, 2), ("DDPStrategy", "FSDPStrategy")
        )
    ],
)
def test_epochs_end_together(kind: str, accumulate: int, strategy: str, tmp_path: Path, workers2: WorkerGroup) -> None:
    options: dict[str, Any] = dict(accumulate=accumulate, strategy=dict(type=strategy))
    if not kind.startswith("sized"):
        options["train_cfg"] = dict(by_epoch=False, max_iters=8)
    expected = updates(accumulate, 3)[: 8 if not kind.startswith("sized") else None]
    parts = workers2.run(train, str(tmp_path), kind, hooks=[SaveEvery()], **options)
    assert [part["trained"] for part in parts] == [expected, expected]
    after = -(-5 // accumulate)
    said = [line for line in parts[0]["said"] if "ended there for all" in line]
    assert said == [
        f"train_dataloader: 1 of 2 processes had no more batches after {after} iterations of the epoch, so it ended there "
        "for all; the others skip their remaining batches, in every epoch"
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


# Before training


def of_length(length: int) -> Any:
    return dict(batch_size=2, dataset=Samples(length), collate_fn="default_collate")


def train_on(folder: str, lengths: tuple[int, int], kind: str, **changes: Any) -> Result:
    """What this process trained on of data that it has ``lengths[rank]`` of."""
    watch = Watch()
    length = lengths[int(os.environ["RANK"])]
    given: Any = of_length(length)
    if kind == "list":
        given = batches(0, length)
    elif kind == "distributed":
        dataset = Samples(length)
        sampler: Any = DistributedSampler(dataset, num_replicas=2, rank=int(os.environ["RANK"]), shuffle=False)
        given = DataLoader(dataset, batch_size=2, sampler=sampler)
    elif kind == "own sampler":
        dataset = Samples(length)
        given = DataLoader(dataset, batch_size=2, sampler=SubsetRandomSampler(range(length)))
        given = dict(loader=given, shard=False)
    runner = make_runner(folder, train_dataloader=given, custom_hooks=[watch], **changes)
    try:
        runner.train()
        place = (runner.epoch, runner.iter, runner.max_iters)
    finally:
        runner.strategy.leave()
    return {"trained": watch.trained, "place": place}


def test_a_dataset_that_is_dealt_out_has_to_be_one(tmp_path: Path, workers2: WorkerGroup) -> None:
    for kind in ("list", "dataset"):
        with pytest.raises(
            WorkerError, match="train_dataloader.dataset: has 10 to 14 samples depending on the process"
        ):
            workers2.run(train_on, str(tmp_path), (10, 14), kind)


def test_a_list_of_batches_is_dealt_out(tmp_path: Path, workers2: WorkerGroup) -> None:
    parts = workers2.run(train_on, str(tmp_path), (5, 5), "list", train_cfg=dict(max_epochs=1))
    assert [part["trained"] for part in parts] == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [0, 1]]]


def test_a_sampler_of_the_user_s(tmp_path: Path, workers2: WorkerGroup) -> None:
    parts = workers2.run(train_on, str(tmp_path), (14, 14), "distributed", train_cfg=dict(max_epochs=2))
    assert [len(part["trained"]) for part in parts] == [8, 8]
    assert sorted(i for part in parts for update in part["trained"][:4] for i in update) == list(range(14))
    parts = workers2.run(train_on, str(tmp_path), (10, 14), "own sampler", train_cfg=dict(max_epochs=2))
    assert [part["place"] for part in parts] == [(2, 10, 10), (2, 10, 10)]


def test_a_state_does_not_fit_another_number_of_processes(tmp_path: Path, workers2: WorkerGroup) -> None:
    optimizer = dict(type="AdamW", lr=0.02)
    options: dict[str, Any] = dict(train_dataloader=WithPlace((5, 5)), optim_wrapper=dict(optimizer=optimizer))
    whole = Watch()
    runner = make_runner(tmp_path / "one", custom_hooks=[SaveEvery({2, 5}), whole], **options)
    runner.train()
    with pytest.raises(
        WorkerError, match="with shards=1, it is 2 now, and the order of a WithPlace cannot be split again"
    ):
        workers2.run(train, str(tmp_path / "one"), "sized state", at=2)
    parts = workers2.run(train, str(tmp_path / "one"), "sized state", at=5)
    assert [len(part["trained"]) for part in parts] == [10, 10]
    assert any("The loader starts the next epoch without its saved state: the loader's state is that of 1 data shard" in line
               for line in parts[0]["said"])  # fmt: skip


# Evaluation


def evaluate(folder: str, kind: str, lengths: tuple[int, int]) -> Any:
    """The metrics of two rounds, of a model whose forward communicates."""
    runner = make_runner(
        folder,
        strategy=FSDP,
        val_dataloader=source(kind, lengths),
        val_cfg=dict(),
        val_evaluator=dict(type=Accuracy),
        **dict.fromkeys(("train_dataloader", "train_cfg", "optim_wrapper")),
    )
    try:
        return [runner.val() for _ in range(2)]
    finally:
        runner.strategy.leave()


@pytest.mark.parametrize("lengths", [(5, 7), (3, 0), (0, 3)], ids=str)
@pytest.mark.parametrize("kind", ["stream", "sized own", "sized state"])
def test_every_batch_is_evaluated_once(
    kind: str, lengths: tuple[int, int], tmp_path: Path, workers2: WorkerGroup
) -> None:
    for rounds in workers2.run(evaluate, str(tmp_path), kind, lengths):
        for metrics in rounds:
            assert metrics["count"] == 2 * sum(lengths)
            expected = [*range(2 * lengths[0]), *range(100, 100 + 2 * lengths[1])]
            assert sorted(metrics["indices"]) == expected
