"""Two processes train on and evaluate each sample once, whatever gives the samples; where nobody can know, the user is asked."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)

from flextrain import ConfigError
from flextrain.core.comm.collectives import get_rank
from flextrain.runner.data.samplers import DefaultSampler, DividedSampler
from flextrain.testing import WorkerError, WorkerGroup

from .test_evaluation import evaluate
from .training import Samples, Watch, built_loader, make_runner, refuses, validation

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("quick")]
LENGTH = 25


class Stream(IterableDataset[Any]):
    """All samples, of which each worker has its own; every one draws a number."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        order = torch.randperm(LENGTH).tolist() if info is None else range(info.id, LENGTH, info.num_workers)
        return (Samples(LENGTH)[i] for i in order)

    def __len__(self) -> int:
        return LENGTH


class Counting(IterableDataset[Any]):
    """A stream with a state."""

    position = 0

    def __iter__(self) -> Iterator[Any]:
        while self.position < LENGTH:
            self.position += 1
            yield Samples(LENGTH)[self.position - 1]
        self.position = 0

    def __len__(self) -> int:
        return LENGTH

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Half:
    """The samples of this process, by their numbers."""

    def __getitem__(self, index: int) -> Any:
        return Samples(LENGTH + 1)[2 * index + get_rank()]

    def __len__(self) -> int:
        return (LENGTH + 1) // 2


class HalfStream(Half, IterableDataset[Any]):
    """The same one after the other."""

    def __iter__(self) -> Iterator[Any]:
        return map(self.__getitem__, range(len(self)))


class Backwards(Sampler[int]):
    """A sampler of the user's."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(LENGTH - 1, -1, -1))

    def __len__(self) -> int:
        return LENGTH


class Unseeded(Backwards):
    """Another order on every process."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(LENGTH)) if get_rank() else super().__iter__()


class Endless(Sampler[int]):
    """Pass after pass, and so without a length."""

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from torch.randperm(LENGTH).tolist()


class Mirrored(BatchSampler):
    """Batches of the user's."""

    def __iter__(self) -> Iterator[list[int]]:
        return (batch[::-1] for batch in super().__iter__())


def own_function() -> Iterator[Any]:
    yield from DataLoader(Samples(LENGTH), batch_size=2)


def source(kind: str, size: int, shard: bool | None = True) -> Any:
    """Data whose samples are the same on every process, in batches of ``size``."""
    samples = Samples(LENGTH)
    common = dict(batch_size=size, collate_fn=default_collate)
    asked = {} if shard is None else dict(shard=shard)
    weighted = WeightedRandomSampler(torch.arange(1.0, LENGTH + 1), 20)
    if kind.startswith("torch"):  # known to give all processes the same
        torchs = {
            "torch weighted": weighted,
            "torch subset": SubsetRandomSampler(range(3, 23)),
            "torch shuffled": RandomSampler(samples),
            "torch in order": SequentialSampler(samples),
            "torch replaced": RandomSampler(samples, replacement=True, generator=torch.Generator().manual_seed(7)),
        }
        sampler = torchs[kind]
        if kind in ("torch weighted", "torch replaced"):
            return DataLoader(samples, sampler=sampler, **common)
        return DataLoader(samples, batch_sampler=BatchSampler(sampler, size, False), collate_fn=default_collate)
    given = {
        "stream": lambda: dict(dataset=Stream(), **common),
        "state": lambda: dict(dataset=Counting(), **common),
        "workers": lambda: dict(dataset=Stream(), num_workers=2, **common),
        "loader": lambda: dict(loader=DataLoader(Stream(), **common)),
        "function": lambda: dict(loader=own_function),
        "sampler": lambda: dict(dataset=samples, sampler=Backwards(), **common),
        "endless": lambda: dict(dataset=samples, sampler=Endless(), **common),
        "unseeded": lambda: dict(dataset=samples, sampler=Unseeded(), **common),
        "batches": lambda: dict(dataset=samples, batch_sampler=Mirrored(weighted, size, False), collate_fn=default_collate),
        "weighted": lambda: dict(
            dataset=samples, sampler=dict(type="torch.utils.data:WeightedRandomSampler", weights=[1.0] * LENGTH, num_samples=20), **common
        ),
    }  # fmt: skip
    return given[kind]() | asked


KINDS = ["stream", "state", "loader", "function", "sampler", "batches", "weighted"]
TORCHS = ["torch weighted", "torch subset", "torch shuffled", "torch in order", "torch replaced"]


def trained(folder: str, data: Any, accumulate: int = 1, **changes: Any) -> list[list[int]]:
    watch = Watch()
    epochs = dict(by_epoch=False, max_iters=7) if isinstance(data, dict) and data.get("loader") is own_function else {}
    runner = make_runner(
        folder,
        train_dataloader=data,
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1), accumulative_counts=accumulate),
        custom_hooks=[watch],
        **{"train_cfg": epochs or dict(max_epochs=1), **changes},
    )
    try:
        runner.train()
    finally:
        runner.strategy.leave()
    return watch.trained


def trained_on(folder: str, kind: str, shard: bool | None = True, **changes: Any) -> list[list[int]]:
    return trained(folder, source(kind, 2, shard), **changes)


@pytest.mark.parametrize("kind", [*KINDS, *TORCHS, pytest.param("workers", marks=pytest.mark.full)])
def test_every_update_has_the_samples_that_one_process_takes(tmp_path: Path, workers2: WorkerGroup, kind: str) -> None:
    diff = dict(randomness=dict(seed=1, diff_rank_seed=True))  # which would draw another order on every process
    parts = workers2.run(trained_on, str(tmp_path / "two"), kind, **diff)
    by_batch = kind in ("function", "batches")
    alone = trained(str(tmp_path / "one"), source(kind, 2 if by_batch else 4), 2 if by_batch else 1, **diff)
    assert [len(updates) for updates in parts] == [len(alone)] * 2
    for first, second, whole in zip(*parts, alone, strict=True):
        both = sorted(chain(first, second))
        assert both == sorted(whole) or (len(both) - len(whole) in (1, 2) and set(both) >= set(whole))  # the last one
    if kind in ("torch shuffled", "stream"):
        assert list(chain(*alone)) != sorted(chain(*alone))


def test_every_update_of_an_order_without_an_end(tmp_path: Path, workers2: WorkerGroup) -> None:
    changes = dict(train_cfg=dict(by_epoch=False, max_iters=9))
    parts = workers2.run(trained_on, str(tmp_path / "two"), "endless", **changes)
    alone = trained(str(tmp_path / "one"), source("endless", 4), **changes)
    assert [sorted(chain(*both)) for both in zip(*parts, strict=True)] == [sorted(update) for update in alone]


def resumed(folder: str, kind: str) -> list[list[int]]:
    """What is trained on after the third of several updates."""
    trained_on(folder, kind, default_hooks=dict(checkpoint=dict(by_epoch=False, interval=3)))
    return trained_on(folder, kind, resume=f"{folder}/iter_3")


def drawn_apart(folder: str, now: bool) -> list[list[int]]:
    """What is trained on after the third of several updates, of an order that each process drew for itself."""
    apart = dict(randomness=dict(seed=1, diff_rank_seed=True))
    trained_on(folder, "weighted", False, default_hooks=dict(checkpoint=dict(by_epoch=False, interval=3)), **apart)
    apart["randomness"]["diff_rank_seed"] = now
    return trained_on(folder, "weighted", False, resume=f"{folder}/iter_3", **apart)


def test_an_order_drawn_apart_is_not_drawn_together_in_the_middle(tmp_path: Path, workers2: WorkerGroup) -> None:
    assert workers2.run(drawn_apart, str(tmp_path / "same"), True)
    with pytest.raises(WorkerError, match="in the middle of an epoch with own_draws=True, it is False now"):
        workers2.run(drawn_apart, str(tmp_path / "other"), False)


def test_the_comparison_of_orders_takes_nothing_from_an_iterator() -> None:
    """A sampler that keeps one over its passes would begin with later samples on several processes."""

    class Kept(Backwards):
        def __init__(self) -> None:
            self.stream = (number for number in range(1000))

        def __iter__(self) -> Iterator[int]:
            return islice(self.stream, LENGTH)

    halves = [DividedSampler(Kept(), (index, 2), True) for index in range(2)]
    assert halves[0].begin(7) == halves[1].begin(7)
    assert list(chain(*zip(*halves, strict=True)))[:LENGTH] == list(range(LENGTH))


@pytest.mark.parametrize("kind", ["stream", "state", "batches", "torch weighted"])
def test_a_divided_epoch_goes_on_where_it_was(tmp_path: Path, workers2: WorkerGroup, kind: str) -> None:
    whole = workers2.run(trained_on, str(tmp_path / "whole"), kind)
    assert workers2.run(resumed, str(tmp_path / "run"), kind) == [updates[3:] for updates in whole]


def counted(folder: str, kind: str, shard: bool | None = True) -> list[int]:
    parts = validation() | dict(val_dataloader=source(kind, 4, shard))
    return evaluate(folder, **parts)["indices"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["stream", "sampler", "torch weighted"])
def test_evaluation_counts_each_sample_as_one_process_does(tmp_path: Path, workers2: WorkerGroup, kind: str) -> None:
    alone = sorted(counted(str(tmp_path), kind))
    assert [sorted(found) for found in workers2.run(counted, str(tmp_path), kind)] == [alone] * 2


NAMES = dict(
    stream="Stream",
    loader="Stream",
    function="own_function",
    sampler="what its Backwards chooses",
    batches="what its Mirrored chooses",
)


@pytest.mark.parametrize("kind, name", NAMES.items())
@pytest.mark.parametrize("training", [True, False])
def test_what_may_give_all_processes_the_same_is_asked_for(kind: str, name: str, training: bool) -> None:
    given = source(kind, 2, None)
    given = given.get("loader", given)
    with refuses(
        ConfigError, begins=f"train_dataloader.shard: missing, every one of the 2 processes may get all of {name}; "
    ):
        built_loader(given, (0, 2), training)
    built_loader(given, (0, 1), training)
    wanted = given if isinstance(given, dict) else dict(loader=given)
    built_loader(wanted | dict(shard=False), (0, 2), training)


def test_orders_that_differ_are_not_divided(tmp_path: Path, workers2: WorkerGroup) -> None:
    with pytest.raises(
        WorkerError, match="train_dataloader.sampler: gives other samples on process 1 than on process 0"
    ):
        workers2.run(trained_on, str(tmp_path), "unseeded")
    with pytest.raises(WorkerError, match="val_dataloader.sampler: gives other samples on process 1"):
        workers2.run(counted, str(tmp_path), "unseeded")


def own_data(folder: str, kind: str) -> tuple[list[list[int]], list[int]]:
    """What a process trains on and evaluates if its data are its own: a stream, or a dataset that holds its samples."""
    dataset: Any = HalfStream() if kind == "stream" else Half()
    data = dict(batch_size=4, dataset=dataset, collate_fn="default_collate", shard=False)
    updates = trained(folder, data)
    return updates, evaluate(folder, **validation() | dict(val_dataloader=data))["indices"]


@pytest.mark.parametrize("kind", ["stream", "numbered"])
def test_data_of_its_own_are_not_divided_again(tmp_path: Path, workers2: WorkerGroup, kind: str) -> None:
    (first, seen), (second, _) = workers2.run(own_data, str(tmp_path), kind)
    assert sorted(chain(*first, *second)) == sorted(seen) == list(range(LENGTH + 1))
    assert sorted(chain(*first)) == list(range(0, LENGTH + 1, 2))


class LikeTorchs(Sampler[int]):
    """A sampler of the user's that deals as torch's does, without its class."""

    def __init__(self, part: tuple[int, int]) -> None:
        self.rank, self.num_replicas = part

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, LENGTH, self.num_replicas))

    def __len__(self) -> int:
        return len(range(self.rank, LENGTH, self.num_replicas))


class Around(Backwards):
    """A sampler around another one."""

    def __init__(self, sampler: Sampler[int]) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[int]:
        return iter(self.sampler)

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]


SAMPLES = Samples(LENGTH)
DEALING = {
    "DistributedSampler": lambda index, count: DistributedSampler(SAMPLES, num_replicas=count, rank=index),  # type: ignore[var-annotated,arg-type]
    "Around": lambda index, count: Around(DistributedSampler(SAMPLES, num_replicas=count, rank=index)),  # type: ignore[arg-type]
    "LikeTorchs": lambda index, count: LikeTorchs((index, count)),
    "DefaultSampler": lambda index, count: DefaultSampler(SAMPLES, shard=(index, count)),
}


@pytest.mark.parametrize("kind", DEALING)
@pytest.mark.parametrize("form", ["dict", "DataLoader", "batches"])
def test_a_sampler_that_deals_to_others_is_refused(kind: str, form: str) -> None:
    def built(part: tuple[int, int], shard: bool = True) -> Any:
        sampler = DEALING[kind](*part)
        given: dict[str, Any] = dict(dataset=SAMPLES, batch_size=2, sampler=sampler)
        if form == "batches":
            given = dict(dataset=SAMPLES, batch_sampler=Mirrored(sampler, 2, False))
        data = dict(loader=DataLoader(**given)) if form == "DataLoader" else given
        return built_loader(data | dict(shard=shard), (2, 4))

    with pytest.raises(
        ConfigError, match="deals the data to 2 processes and gives this one part 0, but the strategy has 4"
    ):
        built((0, 2))
    built((0, 2), shard=False)
    assert len(built((2, 4))) in (3, 4)  # and not a part of the part
