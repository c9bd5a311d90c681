"""Batches come from whatever gives them: loaders with methods of their own or a state, lists, functions, streams."""

from __future__ import annotations

import itertools
import logging
import math
import multiprocessing
import queue
import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, default_collate

from flextrain import CheckpointError, ConfigError
from flextrain.runner import build_dataloader
from flextrain.runner.data.dataloaders import TrainData

from .training import (
    Accuracy,
    Samples,
    SaveEvery,
    Watch,
    data_workers,
    differences,
    make_runner,
    validation,
    whole_state,
)

pytestmark = pytest.mark.usefixtures("quick")

ITERATIONS = dict(by_epoch=False, max_iters=9)


class Packer(DataLoader[Any]):
    """Two batches as one, after a shuffle of its own; its length is that of what it gives."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        held: list[Any] = []
        for batch in super().__iter__():
            held.append(batch)
            if len(held) == 2:
                random.shuffle(held)
                yield {name: torch.cat([part[name] for part in held]) for name in held[0]}
                held = []
        yield from held

    def __len__(self) -> int:
        return math.ceil(super().__len__() / 2)


class Prefetcher(DataLoader[Any]):
    """Reads in a thread, two batches ahead."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        batches: queue.Queue[Any] = queue.Queue(2)

        def read(source: Iterator[Any]) -> None:
            for batch in source:
                batches.put(batch)
            batches.put(None)

        threading.Thread(target=read, args=[super().__iter__()], daemon=True).start()
        return iter(batches.get, None)


class Named(DataLoader[Any]):
    """A subclass that changes nothing about the batches."""

    def describe(self) -> str:
        return f"{type(self).__name__} of {len(self)}"


def collated(samples: Samples, size: int = 4) -> list[Any]:
    return [
        default_collate([samples[i] for i in range(start, min(start + size, len(samples)))])
        for start in range(0, len(samples), size)
    ]


class Restartable:
    """Its own iterator, as DALI's are: at its end it stays there until it is reset."""

    def __init__(self, samples: Samples) -> None:
        self.batches, self.place, self.resets = collated(samples), 0, 0

    def __iter__(self) -> Restartable:
        return self

    def __next__(self) -> Any:
        if self.place == len(self.batches):
            raise StopIteration
        self.place += 1
        return self.batches[self.place - 1]

    def __len__(self) -> int:
        return len(self.batches)

    def reset(self) -> None:
        self.place, self.resets = 0, self.resets + 1


class WithState:
    """Goes through its samples in an order of its own, drawn for each pass, and says where it is in tensors and tuples."""

    def __init__(self, samples: Samples, passes_end: bool = True) -> None:
        self.samples, self.passes, self.place = samples, 0, 0

    def __iter__(self) -> Iterator[Any]:
        order = np.random.default_rng(self.passes).permutation(len(self.samples))
        while self.place < len(order):
            chosen = order[self.place : self.place + 4]
            self.place += len(chosen)
            noise = 0.1 * torch.rand(len(chosen), 6)
            batch = default_collate([self.samples[int(i)] for i in chosen])
            yield {**batch, "x": batch["x"] + noise}
        self.passes, self.place = self.passes + 1, 0

    def __len__(self) -> int:
        return math.ceil(len(self.samples) / 4)

    def state_dict(self) -> dict[Any, Any]:
        return {"place": (self.passes, self.place), 7: torch.tensor([self.place]), "array": np.arange(self.place)}

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        assert state[7].tolist() == [len(state["array"])] == [state["place"][1]]
        self.passes, self.place = state["place"]


class Batched(IterableDataset[Any]):
    """A stream that gives batches by itself, as WebDataset's loaders do."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        order = list(range(len(self.samples)))
        random.shuffle(order)
        for start in range(0, len(order), 4):
            yield default_collate([self.samples[i] for i in order[start : start + 4]])


def stateful(samples: Samples, **options: Any) -> Any:
    module = pytest.importorskip("torchdata.stateful_dataloader")
    return module.StatefulDataLoader(samples, batch_size=4, **options)


class Drawn(RandomSampler):
    """An order that is drawn from the process's generator when it is read; it has no state."""

    def __iter__(self) -> Iterator[int]:
        order = list(range(len(self)))
        random.shuffle(order)
        yield from order


class Remembering(Samples):
    """A dataset with a state: how often it was read."""

    reads = 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.reads += 1
        sample = super().__getitem__(index)
        return {**sample, "x": sample["x"] + 0.01 * self.reads}

    def state_dict(self) -> dict[str, int]:
        return {"reads": self.reads}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.reads = state["reads"]


def function(samples: Samples) -> Callable[[], Iterator[Any]]:
    def batches() -> Iterator[Any]:
        yield from Batched(samples)

    return batches


MAKERS: dict[str, Any] = {
    "packer": lambda samples: Packer(samples, batch_size=2, shuffle=True),
    "packer with workers": lambda samples: Packer(
        samples, batch_size=2, shuffle=True, num_workers=1, persistent_workers=True, generator=torch.Generator()
    ),
    "prefetcher": lambda samples: Prefetcher(samples, batch_size=4, shuffle=True),
    "named": lambda samples: Named(samples, batch_size=4, shuffle=True),
    "list": collated,
    "function": function,
    "stream": Batched,
    "cycle": lambda samples: itertools.cycle(collated(samples)),
    "iterator": Restartable,
    "state": WithState,
    "stateful": partial(stateful, shuffle=True),
    "stateful, workers": partial(stateful, shuffle=True, num_workers=2),
    "stateful, drawn order": lambda samples: stateful(samples, sampler=Drawn(samples)),
    "stateful, drawn order, workers": lambda samples: stateful(samples, sampler=Drawn(samples), num_workers=2),
    "stateful dataset": lambda samples: stateful(Remembering(len(samples)), shuffle=True),
}
WITHOUT_LENGTH = ("function", "stream", "cycle")


def settings(kind: str, accumulate: int = 1) -> dict[str, Any]:
    noisy = kind not in (
        "prefetcher",
        "list",
        "cycle",
        "iterator",
        "packer with workers",
        "stateful, drawn order, workers",
    )
    changes = dict(
        train_dataloader=MAKERS[kind](Samples(22, noisy=noisy)),
        optim_wrapper=dict(optimizer=dict(type="AdamW", lr=0.02), accumulative_counts=accumulate),
    )
    return changes | (dict(train_cfg=ITERATIONS) if kind in WITHOUT_LENGTH else {})


@pytest.mark.processes
@pytest.mark.parametrize(
    "kind, accumulate",
    [
        *((kind, 2) for kind in ("packer", "function", "stateful")),
        *(pytest.param(kind, 1, marks=pytest.mark.full) for kind in ("packer", "function", "stateful")),
        *((kind, 1) for kind in MAKERS if kind not in ("packer", "function", "stateful")),
        *(
            pytest.param(kind, 2, marks=pytest.mark.full)
            for kind in MAKERS
            if kind not in ("packer", "function", "stateful")
        ),
    ],
)
def test_a_resumed_run_ends_where_the_whole_one_does(kind: str, accumulate: int, tmp_path: Path) -> None:
    watch = Watch()
    whole = make_runner(tmp_path / "whole", custom_hooks=[watch, SaveEvery()], **settings(kind, accumulate))
    whole.train()
    count = whole.iter
    assert count == (9 if kind in WITHOUT_LENGTH else 3 * -(-6 // accumulate))
    first = sorted(itertools.chain(*watch.trained[: -(-6 // accumulate)]))
    assert first == list(range(22))
    for at in (1, -(-6 // accumulate), -(-6 // accumulate) + 2):
        seen = Watch()
        again = make_runner(
            tmp_path / "again",
            custom_hooks=[seen],
            load_from=tmp_path / "whole" / f"iter_{at}",
            resume=True,
            **settings(kind, accumulate),
        )
        again.train()
        assert seen.trained == watch.trained[at:], f"resumed at {at}"
        assert not differences(whole_state(again), whole_state(whole)), f"resumed at {at}"


# A class of its own


def build(cfg: Any, shard: tuple[int, int] = (0, 1), training: bool = True) -> Any:
    logger = logging.getLogger("flextrain")
    return build_dataloader(cfg, training=training, seed=5, shard=shard, where="train_dataloader", logger=logger)


@pytest.mark.parametrize("count", [1, 2])
def test_a_subclass_keeps_its_methods_and_is_dealt_out(count: int) -> None:
    given = Packer(Samples(24), batch_size=3, shuffle=True)
    seen = []
    for index in range(count):
        built = build(given, (index, count))
        assert type(built) is Packer
        assert len(built) == 4 // count
        windows = list(TrainData(built, 1, seed=0).windows(0))
        assert [len(window[0]["index"]) for window in windows] == [6] * (4 // count)
        seen += [int(i) for window in windows for i in window[0]["index"]]
    assert sorted(seen) == list(range(24))
    assert type(given.sampler) is RandomSampler  # the user's own is what it was


def test_a_subclass_without_methods_of_its_own_goes_on_at_any_position() -> None:
    built = build(Named(Samples(24), batch_size=3))
    assert built.describe() == "Named of 8"
    assert TrainData(built, 1, seed=0).splittable is built.sampler


class RepeatedBatches:
    """timm's and others' way to keep workers alive: a batch sampler that does not end."""

    def __init__(self, batches: Any) -> None:
        self.sampler = batches

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from self.sampler


class MultiEpochs(DataLoader[Any]):
    """Has one iterator for all epochs, made when it is."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        object.__setattr__(self, "batch_sampler", RepeatedBatches(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        return len(self.batch_sampler.sampler)  # type: ignore[union-attr]

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for _ in range(len(self)):
            yield next(self.iterator)


class Holding(DataLoader[Any]):
    """A part of it reads it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.read = super().__iter__

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return iter(self.read())


@pytest.mark.parametrize("kind", [MultiEpochs, Holding])
def test_a_loader_that_holds_on_to_itself_is_left_as_it_is(kind: type[DataLoader[Any]]) -> None:
    given = kind(Samples(12), batch_size=4)
    with pytest.raises(ConfigError, match=rf"train_dataloader.shard: missing, .* all of {kind.__name__}; "):
        build(given, (1, 2))
    assert build(dict(loader=given, shard=False), (1, 2)) is given
    for epoch in range(2):
        batches = [batch for window in TrainData(given, 2, seed=0).windows(epoch) for batch in window]
        assert [batch["index"].tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


# What is said, and refused


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What is logged, warnings and lines of information."""
    logger, found = logging.getLogger("flextrain"), []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield found
    logger.removeHandler(handler)
    logger.setLevel(before)


READS_AGAIN = (
    "reads it again from its beginning, which is exact if it gives the same batches on the same number of processes"
)


def test_what_it_means_for_processes_and_for_resuming_is_said_once(said: list[str]) -> None:
    samples = Samples(8)
    build(dict(loader=function(samples), shard=True), (0, 2))
    build(Restartable(samples))
    build(WithState(samples))
    build(collated(samples), (0, 2))
    assert said == [
        f"train_dataloader: resuming in the middle of an epoch of function.<locals>.batches {READS_AGAIN}",
        f"train_dataloader: resuming in the middle of an epoch of Restartable {READS_AGAIN}",
        "train_dataloader: resuming in the middle of an epoch of WithState continues from its state_dict in the "
        "checkpoint, on the same number of processes",
    ]


def test_an_iterator_is_reset_when_a_pass_finds_it_at_its_end(tmp_path: Path) -> None:
    given = Restartable(Samples(8))
    make_runner(tmp_path, train_dataloader=given).train()
    assert given.resets == 2


class Lying(Restartable):
    """Says another length than it has."""

    def __init__(self, samples: Samples, says: int) -> None:
        super().__init__(samples)
        self.says = says

    def __len__(self) -> int:
        return self.says


@pytest.mark.parametrize("says", [2, 5])
def test_a_length_that_is_not_true_is_said_once(says: int, tmp_path: Path, said: list[str]) -> None:
    watch = Watch()
    runner = make_runner(
        tmp_path, train_dataloader=Lying(Samples(12), says), custom_hooks=[watch], log_level="INFO",
        default_hooks=dict(checkpoint=dict(by_epoch=False, interval=4)),
    )  # fmt: skip
    runner.train()
    assert watch.trained == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]] * 3
    lines = [line for line in said if "len()" in line]
    assert lines == [
        f"train_dataloader: len() of Lying says {says} batches, but the epoch had 3; all of them are trained on, schedules "
        "and the estimated time use len()"
    ]
    assert (tmp_path / "latest").read_text() == "iter_9", "the end is saved, whatever the length says"


class Nothing(Restartable):
    """Gives no batch, and says that it has three."""

    def __next__(self) -> Any:
        raise StopIteration

    def __len__(self) -> int:
        return 3


def gives_none() -> None:
    """No function for batches."""


@pytest.mark.parametrize("by_epoch", [True, False])
@pytest.mark.parametrize("given", [Nothing, partial(map, id), lambda _: list, lambda _: gives_none])
def test_no_batch_is_an_error(given: Any, by_epoch: bool, tmp_path: Path) -> None:
    train_cfg = dict(by_epoch=True, max_epochs=2) if by_epoch else dict(by_epoch=False, max_iters=2)
    with pytest.raises(ConfigError, match="^train_"):
        make_runner(tmp_path, train_dataloader=given(Samples(4)), train_cfg=train_cfg).train()


def test_an_iterator_that_cannot_begin_anew_is_an_error(tmp_path: Path) -> None:
    class Once(Restartable):
        reset = None  # type: ignore[assignment]

    with pytest.raises(
        ConfigError, match="train_dataloader: .*Once gives no batch, one that can be read once needs a reset"
    ):
        make_runner(tmp_path, train_dataloader=Once(Samples(8))).train()


class Untold(WithState):
    def state_dict(self) -> dict[Any, Any]:
        return {"inner": [{"file": object()}]}


def test_a_state_that_cannot_be_saved_is_refused_by_name(tmp_path: Path) -> None:
    runner = make_runner(tmp_path, train_dataloader=Untold(Samples(8)), custom_hooks=[SaveEvery()])
    with pytest.raises(CheckpointError, match=r"Untold.state_dict\)\['inner'\]\[0\]\['file'\]: object cannot be saved"):
        runner.train()


def test_a_state_goes_with_its_loader(tmp_path: Path, said: list[str]) -> None:
    samples = Samples(22)
    saved = make_runner(tmp_path / "a", train_dataloader=WithState(samples), custom_hooks=[SaveEvery({2, 6})])
    saved.train()
    options = dict(train_dataloader=collated(samples), resume=True, log_level="INFO")
    with pytest.raises(CheckpointError, match="sampler=WithState, it is DefaultSampler now"):
        make_runner(tmp_path / "b", load_from=tmp_path / "a" / "iter_2", **options).train()
    make_runner(tmp_path / "c", load_from=tmp_path / "a" / "iter_6", **options).train()
    assert [line for line in said if "The loader starts" in line] == [
        "The loader starts the next epoch without its saved state: has the state of a loader, and DefaultSampler takes none"
    ]
    anew = make_runner(
        tmp_path / "d",
        load_from=tmp_path / "a" / "iter_2",
        **{**options, "train_dataloader": WithState(samples), "resume": dict(data=False)},
    )
    anew.train()
    assert anew.iter == 20  # two, and three whole epochs


# Evaluation


@pytest.mark.parametrize("kind", ["packer", "list", "function", "iterator", "stream", "state"])
def test_evaluation_counts_every_sample_once(kind: str, tmp_path: Path) -> None:
    runner = make_runner(
        tmp_path,
        val_dataloader=MAKERS[kind](Samples(22)),
        val_cfg=dict(),
        val_evaluator=dict(type=Accuracy),
        **dict.fromkeys(("train_dataloader", "train_cfg", "optim_wrapper")),
    )
    for _ in range(3):
        metrics = runner.val()
        assert sorted(metrics["indices"]) == list(range(22))
    assert runner.val_loop is not None
    assert runner.val_loop.num_batches == 6


@pytest.mark.parametrize("shuffle", [True, False])
def test_torchdata_s_samplers_are_dealt_out_too(shuffle: bool, said: list[str]) -> None:
    given = stateful(Samples(12), shuffle=shuffle)
    parts = [build(given, (index, 2)) for index in range(2)]
    assert {type(part) for part in parts} == {type(given)}
    seen = [[int(i) for batch in part for i in batch["index"]] for part in parts]
    assert sorted(seen[0] + seen[1]) == list(range(12))
    assert f"got a DefaultSampler(shuffle={shuffle}) that splits it over 2 processes" in said[0]


def test_torchdata_s_loader_goes_on_at_any_position_where_its_state_is_no_more() -> None:
    for shuffle in (True, False):
        built = build(stateful(Samples(12), shuffle=shuffle))
        assert TrainData(built, 1, seed=0).splittable is built.sampler
    for loader in (stateful(Remembering(12)), stateful(Batched(Samples(12)))):
        data = TrainData(build(loader), 1, seed=0)
        assert data.splittable is None
        assert data.keeps_position


@pytest.mark.processes
def test_no_worker_is_left_when_training_has_ended(tmp_path: Path) -> None:
    """Workers that are kept between epochs would end with the runner only, and take five seconds each for that."""
    workers = dict(**data_workers(1), persistent_workers=True)
    before = {*multiprocessing.active_children()}
    loader = dict(batch_size=4, dataset=Samples(26), collate_fn="default_collate", **workers)
    runner = make_runner(tmp_path, train_dataloader=loader, **validation(10, **workers))
    runner.train()
    assert {*multiprocessing.active_children()} == before
    assert runner.val()["count"] == 10
    runner.train_loop._end_workers()
    assert runner.val_loop is not None
    runner.val_loop._end_workers()
