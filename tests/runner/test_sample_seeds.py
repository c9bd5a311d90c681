"""What is drawn for a sample follows from the run's seed, the epoch and the sample's place, whoever reads it and when."""

from __future__ import annotations

import gc
import logging
import random
from collections.abc import Callable, Iterator
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    StackDataset,
    Subset,
    get_worker_info,
)

from flextrain.core.base.errors import DataError
from flextrain.core.random.generators import RandomStream, Watch
from flextrain.runner import build_dataloader
from flextrain.runner.data.dataloaders import TrainData
from flextrain.runner.data.sample_seeds import SeededStream
from flextrain.runner.hooks import Hook

from .training import Samples, make_runner, validation

Row = tuple[Any, ...]


def python() -> float:
    return random.random()


def python_normal() -> float:
    return random.gauss(0.0, 1.0)


def numpy() -> float:
    return float(np.random.rand())


def numpy_normal() -> float:
    return float(np.random.randn())


def pytorch() -> float:
    return float(torch.rand(()))


def pytorch_normal() -> float:
    return float(torch.randn(()))


DRAWS: list[Callable[[], float]] = [python, python_normal, numpy, numpy_normal, pytorch, pytorch_normal]


class Noisy(Dataset[Row]):
    """Samples that draw numbers: their index, and what came."""

    def __init__(self, length: int = 22, draws: list[Callable[[], float]] = DRAWS) -> None:
        self.length, self.draws = length, draws
        self.read: list[int] = []
        self.epoch = 0

    def __len__(self) -> int:
        return self.length

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Row:
        self.read.append(index)
        return (index, *(draw() for draw in self.draws))


class Rarely(Noisy):
    """Most samples draw nothing."""

    def __getitem__(self, index: int) -> Row:
        return super().__getitem__(index) if index % 7 == 5 else (index,)


class AtOnce(Noisy):
    """Reads a batch by a function of its own."""

    def __getitems__(self, indices: list[int]) -> list[Row]:
        return [self[index] for index in indices]


def data(
    dataset: Any, shard: tuple[int, int] = (0, 1), accumulate: int = 1, seed: int = 4, **options: Any
) -> TrainData:
    cfg = options.pop("loader", None) or {"dataset": dataset, "collate_fn": list, "batch_size": 2, **options}
    logger = logging.getLogger("flextrain")
    built = build_dataloader(cfg, training=True, seed=5, shard=shard, where="train_dataloader", logger=logger)
    return TrainData(built, accumulate, seed, shard=shard)


def rows(source: TrainData, *args: Any) -> list[Row]:
    """The samples of all windows, one after the other."""
    return list(chain.from_iterable(chain.from_iterable(source.windows(*args))))


def over_processes(count: int, *args: Any, **options: Any) -> list[Row]:
    """The samples that several processes read, in their order over all of them."""
    make = options.pop("make", Noisy)
    parts = [rows(data(make(), (index, count), **options), *args) for index in range(count)]
    return [row for turn in zip_longest(*parts) for row in turn if row is not None]


def stir() -> None:
    """Move the process's generators, as a model does."""
    for draw in DRAWS * int(torch.randint(1, 4, ())):
        draw()


# Whoever reads it


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_sample_draws_the_same_whoever_reads_it(workers: int, persistent: bool) -> None:
    """On any number of processes, in batches of any size, from any place of an epoch on."""
    options: dict[str, Any] = dict(num_workers=workers)
    if workers and persistent:
        options["persistent_workers"] = True
    whole = [over_processes(1, epoch) for epoch in range(2)]
    assert len({number for epoch in whole for row in epoch for number in row[1:]}) == 2 * 22 * len(DRAWS), "no twice"
    stir()
    alone = data(Noisy(), batch_size=3, accumulate=2, **options)
    assert [rows(alone, epoch) for epoch in range(2)] == whole
    stir()
    assert rows(alone, 1, 2, 3) == whole[1][12:18]
    assert over_processes(2, 1, batch_size=4, **options) == whole[1]


def test_an_epoch_that_goes_on_in_other_batches_draws_the_same() -> None:
    whole = over_processes(1, 3)
    source = data(Noisy(), batch_size=5)
    assert rows(source, 3, source.resume_at(3, 7)) == whole[7:]


def test_another_seed_or_epoch_draws_other_numbers() -> None:
    def drawn(*args: Any, **options: Any) -> set[float]:
        return {number for row in over_processes(1, *args, **options) for number in row[1:]}

    assert not drawn(0) & drawn(1)
    assert not drawn(0) & drawn(0, seed=6)
    assert drawn(0) == drawn(0)


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("workers", [0, 1])
def test_each_generator_alone(draw: Callable[[], float], workers: int) -> None:
    whole = rows(data(Noisy(draws=[draw])), 0)
    stir()
    assert rows(data(Noisy(draws=[draw]), num_workers=workers), 0, 3) == whole[6:]
    assert len({row[1] for row in whole}) == 22


@pytest.mark.processes
@pytest.mark.parametrize("kind", [Noisy, Rarely])
def test_the_process_draws_as_if_nothing_was_read(kind: type[Noisy]) -> None:
    """All but NumPy's spare normal number, which it forgets with every batch, whoever reads it."""

    def drawn(source: TrainData | None) -> list[float]:
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        found = [draw() for draw in DRAWS if draw is not numpy_normal]
        for _ in source.windows(0) if source else range(11):
            found += [draw() for draw in DRAWS if draw is not numpy_normal]
        return found

    assert drawn(data(kind())) == drawn(None)
    spare = []
    for workers in (0, 1):
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        windows = data(kind(), num_workers=workers).windows(0)
        spare.append([np.random.randn() for _ in windows for _ in range(3)])
    assert spare[0] == spare[1]


@pytest.mark.processes
def test_a_dataset_that_draws_rarely_is_read_again_where_it_first_does() -> None:
    dataset = Rarely()
    whole = rows(data(dataset), 0)
    assert sum(len(row) > 1 for row in whole) == 3
    assert len(dataset.read) == 3 + 1, "a sample of those that draw was read once more"
    for start in range(1, 11):
        stir()
        assert rows(data(Rarely()), 0, start) == whole[2 * start :]
    for workers in (1, 2):
        assert rows(data(Rarely(), num_workers=workers), 0) == whole


def test_a_dataset_that_draws_is_read_once() -> None:
    dataset = Noisy()
    given = [row[0] for row in rows(data(dataset), 0)]
    assert dataset.read == given


# What wraps a dataset, and what is drawn for a batch


@pytest.mark.processes
@pytest.mark.parametrize(
    "make",
    [
        lambda: Subset(Noisy(30), range(4, 26)),
        lambda: Subset(Subset(Noisy(40), range(2, 32)), range(4, 26)),
        lambda: StackDataset(Noisy(), Noisy(draws=[pytorch])),
        lambda: StackDataset(a=Noisy(), b=Noisy(draws=[python])),
        lambda: ConcatDataset([Noisy(10), list(range(5)), Noisy(7)]),
    ],
    ids=["subset", "nested", "stack", "named-stack", "concat"],
)
def test_what_wraps_a_dataset_draws_by_sample_too(make: Callable[[], Any]) -> None:
    whole = over_processes(1, 0, make=make)
    assert over_processes(2, 0, make=make, batch_size=3) == whole
    assert over_processes(1, 0, make=make, batch_size=5, num_workers=2) == whole


@pytest.mark.processes
def test_a_dataset_that_reads_batches_draws_by_batch() -> None:
    whole = rows(data(AtOnce()), 0)
    assert rows(data(AtOnce(), num_workers=2), 0) == whole
    stir()
    assert rows(data(AtOnce(), accumulate=3), 0, 2) == whole[12:]
    subset = rows(data(Subset(AtOnce(), range(22))), 0)
    assert subset == whole


def drawing_collate(samples: list[Row]) -> list[Row]:
    return [(*samples[0], *(draw() for draw in DRAWS)), *samples[1:]]


@pytest.mark.processes
@pytest.mark.parametrize("kind", [Noisy, lambda: list(zip(range(22)))], ids=["noisy", "silent"])
def test_what_collating_draws(kind: Any) -> None:
    whole = rows(data(kind(), collate_fn=drawing_collate), 0)
    for workers in (0, 1, 2):
        stir()
        assert rows(data(kind(), collate_fn=drawing_collate, num_workers=workers), 0, 4) == whole[8:]


@pytest.mark.processes
def test_without_batches() -> None:
    def make(workers: int) -> TrainData:
        return data(None, loader=DataLoader(Noisy(), batch_size=None, num_workers=workers, collate_fn=tuple))

    whole = [window[0] for window in make(0).windows(0)]
    stir()
    assert [window[0] for window in make(2).windows(0, 9)] == whole[9:]


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")
def test_with_pinned_memory() -> None:
    assert rows(data(Noisy(), pin_memory=True), 0, 3) == over_processes(1, 0)[6:]


class EndsInside(Noisy):
    """Sample 5 asks an iterator that is at its end for one more, by ``next``."""

    def __getitem__(self, index: int) -> Any:
        return next(iter(())) if index == 5 else torch.tensor(index)


def ends_inside(samples: list[Any]) -> Any:
    return next(iter(()))


@pytest.mark.parametrize("options", [{}, pytest.param({"num_workers": 1}, marks=pytest.mark.processes)])
def test_a_sample_that_stops_is_not_the_end_of_the_data(options: dict[str, Any]) -> None:
    """Python takes it for the end of the batch, or of the epoch: samples were left out without a word."""
    loader = DataLoader(EndsInside(), batch_size=4, **options)
    with pytest.raises(DataError, match=r"EndsInside or its collate_fn: raised StopIteration.* at samples 4, 5, 6, 7"):
        rows(data(None, loader=loader), 0)
    with pytest.raises(DataError, match=r"at samples 0, 1, 2, 3 of the dataset"):
        rows(data(None, loader=DataLoader(Noisy(), batch_size=4, collate_fn=ends_inside, **options)), 0)


class Placed(IterableDataset[int]):
    """A stream with a state of its own."""

    place = 0

    def __iter__(self) -> Iterator[int]:
        while self.place < 12:
            self.place += 1
            yield self.place

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


@pytest.mark.parametrize(
    ("workers", "options"),
    [(0, {}), (0, {"batch_size": None}), pytest.param(1, {}, marks=pytest.mark.processes)],
)
@pytest.mark.parametrize("kind", ["Tosses", "Placed"])
def test_a_collate_function_that_stops_is_not_the_end_of_a_stream(kind: str, workers: int, options: Any) -> None:
    if kind == "Placed" and workers:
        pytest.importorskip("torchdata")
    with pytest.raises(DataError, match=r"ends_inside: raised StopIteration, as next\(\) does at an end"):
        rows(data(globals()[kind](), collate_fn=ends_inside, num_workers=workers, **options), 0)


# Orders that are not flextrain's


class Uneven(BatchSampler):
    """Batches of one, two, three... samples."""

    def __iter__(self) -> Iterator[list[int]]:
        batch: list[int] = []
        size = 1
        for index in self.sampler:
            batch.append(index)
            if len(batch) == size:
                yield batch
                batch, size = [], size + 1


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_orders_of_the_user_s_own(workers: int) -> None:
    def own_sampler(workers: int, size: int = 2) -> TrainData:
        sampler = RandomSampler(range(22), replacement=True)
        return data(None, loader=DataLoader(Noisy(), size, sampler=sampler, num_workers=workers, collate_fn=list))

    def own_batches(workers: int) -> TrainData:
        return data(Noisy(), batch_sampler=dict(type=Uneven), num_workers=workers)

    for make in (own_sampler, own_batches):
        whole = [window[0] for window in make(0).windows(0)]
        stir()
        assert [window[0] for window in make(workers).windows(0, 2)] == whole[2:]
    assert rows(own_sampler(workers, 5), 0) == rows(own_sampler(0), 0)


def test_processes_with_an_order_of_their_own_draw_other_numbers() -> None:
    parts = [
        rows(
            data(None, (i, 2), loader=DataLoader(Noisy(), 2, sampler=RandomSampler(range(22), True), collate_fn=list)),
            0,
        )
        for i in range(2)
    ]
    drawn = [{number for row in part for number in row[1:]} for part in parts]
    assert not drawn[0] & drawn[1]


@pytest.mark.processes
def test_an_infinite_sampler_draws_other_numbers_in_every_pass() -> None:
    def make(workers: int) -> TrainData:
        return data(Noisy(), sampler=dict(type="InfiniteSampler"), num_workers=workers)

    whole = rows(make(0), 0, 0, 33)
    assert len({number for row in whole for number in row[1:]}) == 66 * len(DRAWS)
    assert rows(make(2), 0, 20, 33) == whole[40:]


# Workers


class Curious(Noisy):
    """Says what it finds in a worker."""

    def __getitem__(self, index: int) -> Row:
        info = get_worker_info()
        assert info is not None
        return (
            type(info.dataset) is Curious,
            info.dataset is self,
            self.epoch,
            len(info.dataset),
            *super().__getitem__(0),
        )


def seed_everything(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert isinstance(info.dataset, (Noisy, Tosses))
    random.seed(0), np.random.seed(0), torch.manual_seed(0)


@pytest.mark.processes
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_have_the_user_s_dataset_and_the_epoch(persistent: bool) -> None:
    source = data(Curious(), num_workers=1, persistent_workers=persistent, worker_init_fn=seed_everything)
    for epoch in (0, 1, 4):
        assert {row[:4] for row in rows(source, epoch)} == {(True, True, epoch, 22)}
    assert isinstance(source.loader.dataset, Curious)


class Switched(Noisy):
    """Says which pipeline it has."""

    pipeline = "mosaic"

    def __getitem__(self, index: int) -> Row:
        return (self.pipeline,)


@pytest.mark.processes
def test_kept_workers_begin_anew_where_a_hook_has_changed_the_data() -> None:
    """As PipelineSwitchHook and YOLOXModeSwitchHook of mmdetection do it before an epoch."""
    source = data(Switched(), num_workers=1, persistent_workers=True)
    loader = source.loader
    assert {row[0] for row in rows(source, 0)} == {"mosaic"}
    loader.dataset.pipeline = "plain"
    vars(loader).update(_DataLoader__initialized=False, _iterator=None)
    assert {row[0] for row in rows(source, 1)} == {"plain"}
    vars(loader).update(_DataLoader__initialized=True)
    assert {row[0] for row in rows(source, 2)} == {"plain"}
    source.close()


@pytest.mark.processes
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.full)])
def test_workers_that_seed_themselves(method: str) -> None:
    options = dict(num_workers=1, multiprocessing_context=method, worker_init_fn=seed_everything)
    assert rows(data(Noisy(), **options), 0, 5) == over_processes(1, 0)[10:]


class Collects(Dataset[bool]):
    """Collects garbage; a sample tells of an object that nobody refers to but itself whether this process has ended it."""

    def __init__(self) -> None:
        self.ended = [False]
        left = Left()
        left.itself, left.ended = left, self.ended

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> bool:
        gc.collect()
        return self.ended[0]


class Left:
    itself: Any
    ended: list[bool]

    def __del__(self) -> None:
        self.ended[0] = True


@pytest.mark.processes
def test_a_forked_worker_ends_nothing_of_its_parent() -> None:
    """A process group that its parent left would wait there for a thread that is none, and the worker would crash."""
    gc.disable()
    try:
        options = dict(num_workers=1, multiprocessing_context="fork", collate_fn=list)
        source = data(Collects(), batch_size=1, **options)
        assert [batch for (batch,) in source.windows(0)] == [[False]]
    finally:
        gc.enable()


# Streams


class Tosses(IterableDataset[Row]):
    """Samples in an order that is drawn when it begins, with noise, in parts for workers."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Row]:
        info = get_worker_info()
        order = torch.randperm(40).tolist()[info.id :: info.num_workers] if info else torch.randperm(40).tolist()
        return iter([(self.epoch, index, *(draw() for draw in DRAWS)) for index in order])


@pytest.mark.processes
@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(num_workers=1),
        dict(num_workers=2),
        dict(num_workers=2, persistent_workers=True),
        dict(num_workers=2, persistent_workers=True, worker_init_fn=seed_everything),
    ],
    ids=["none", "one", "two", "persistent", "seeding"],
)
def test_a_stream_draws_the_same_again(options: dict[str, Any]) -> None:
    """Also in its second epoch, which a resumed run begins with new workers."""
    source = data(Tosses(), **options)
    whole = [rows(source, epoch) for epoch in range(3)]
    assert len({number for epoch in whole for row in epoch for number in row[2:]}) >= 3 * 40 * len(DRAWS) / 2
    assert [{row[0] for row in epoch} for epoch in whole] == [{0}, {1}, {2}]
    for epoch in range(3):
        stir()
        assert rows(data(Tosses(), **options), epoch, 3) == whole[epoch][6:]


def test_a_stream_leaves_the_process_alone() -> None:
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = [draw() for _ in range(21) for draw in DRAWS if draw is not numpy_normal]
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    found = [draw() for draw in DRAWS if draw is not numpy_normal]
    for _ in data(Tosses()).windows(0):
        found += [draw() for draw in DRAWS if draw is not numpy_normal]
    assert found == expected


# Evaluation


class Seen(Hook):
    """What validation read, and the losses of training."""

    def __init__(self) -> None:
        self.passes: list[list[float]] = []
        self.losses: list[float] = []

    def before_val_epoch(self, runner: Any) -> None:
        self.passes.append([])

    def before_val_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        self.passes[-1] += data_batch["x"].flatten().tolist()

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        self.losses.append(float(outputs["loss"]))


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("workers", [0, 1])
def test_validation_draws_the_same_every_time_and_moves_nothing(tmp_path: Path, workers: int) -> None:
    """Training drops out as if there was no validation, whose data are augmented and in a random order of their own."""
    seen = [Seen(), Seen()]
    for hook, parts in zip(seen, ({}, validation(num_workers=workers)), strict=True):
        if parts:
            samples = Samples(10, noisy=True)
            parts["val_dataloader"] |= dict(dataset=samples, sampler=RandomSampler(samples))
        make_runner(tmp_path, custom_hooks=[hook], **parts).train()
    assert len(seen[1].passes) == 3
    assert seen[1].passes[0] == seen[1].passes[1] == seen[1].passes[2]
    assert seen[1].losses == seen[0].losses


# The generators themselves


@pytest.mark.parametrize("draw", DRAWS)
def test_a_watch_sees_every_draw_and_undoes_it(draw: Callable[[], float]) -> None:
    watch = Watch()
    draw()  # a spare normal number may be left of it
    for times in (1, 2, 624, 625):
        before = random.getstate(), torch.get_rng_state()
        with watch:
            assert not watch.moved()
            for _ in range(times):
                draw()
            assert watch.moved()
            watch.mark()
            assert not watch.moved()
        assert random.getstate() == before[0]
        assert torch.equal(torch.get_rng_state(), before[1])


def test_states_go_the_long_way_where_memory_is_laid_out_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    from flextrain.core.random import generators as memory

    def drawn() -> list[float]:
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        stream, found = RandomStream(3), []
        for _ in range(3):
            with stream:
                found += [draw() for draw in DRAWS]
            found += [draw() for draw in DRAWS]
        return found

    assert memory._ADDRESS is not None, "CPython lays it out as known"
    quick = drawn()
    monkeypatch.setattr(memory, "_ADDRESS", None)
    monkeypatch.setattr(memory, "_VIEWS", None)
    assert drawn() == quick
    watch = Watch()
    with watch:
        assert not watch.moved()
        random.random()
        assert watch.moved()


def test_a_stream_begins_alike_whatever_device_is_the_default() -> None:
    plain = SeededStream(None)
    plain.begin(3, 1)
    with torch.device("meta"):
        elsewhere = SeededStream(None)
        elsewhere.begin(3, 1)
    assert torch.equal(elsewhere._begins, plain._begins)
