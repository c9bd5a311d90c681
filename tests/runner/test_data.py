"""Samplers and dataloaders: every sample once, over any number of processes, from any position."""

from __future__ import annotations

import logging
import pickle
import random
import tracemalloc
from collections import Counter, namedtuple
from collections.abc import Iterator
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    get_worker_info,
)

from flextrain import ConfigError
from flextrain.core.base.errors import DataError
from flextrain.core.random.generators import RandomStream
from flextrain.runner import DefaultSampler, InfiniteSampler, pseudo_collate
from flextrain.runner.data.dataloaders import TrainData
from flextrain.runner.data.samplers import DividedSampler, Repeatable

from .training import Samples, built_loader, refuses

NUMBERS = list(range(10))


def in_turn(parts: list[list[int]]) -> list[int]:
    """What processes that take turns see together."""
    return [value for row in zip_longest(*parts) for value in row if value is not None]


def loader(cfg: Any, shard: tuple[int, int] = (0, 1), training: bool = True) -> DataLoader[Any]:
    if isinstance(cfg, dict):
        cfg = {"dataset": NUMBERS, "collate_fn": list, **cfg}
    return built_loader(cfg, shard, training)


# Samplers


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_every_sample_once_over_all_processes(count: int, shuffle: bool) -> None:
    samplers = [DefaultSampler(NUMBERS, shuffle, 3, round_up=False, shard=(i, count)) for i in range(count)]
    parts = [list(sampler) for sampler in samplers]
    assert sorted(chain(*parts)) == NUMBERS
    assert [len(sampler) for sampler in samplers] == [len(part) for part in parts]
    if not shuffle:
        assert in_turn(parts) == NUMBERS


@pytest.mark.parametrize("count", [2, 3, 4, 12])
def test_rounding_up_repeats_from_the_beginning(count: int) -> None:
    samplers = [DefaultSampler(NUMBERS, True, 3, shard=(i, count)) for i in range(count)]
    parts = [list(sampler) for sampler in samplers]
    assert {len(part) for part in parts} == {len(samplers[0])} == {-(-10 // count)}
    order = samplers[0].order(0).tolist()
    assert in_turn(parts) == (order * 2)[: count * len(parts[0])]
    assert {sampler.total_size for sampler in samplers} == {count * len(parts[0])}


def test_each_epoch_has_another_order_that_follows_the_seed() -> None:
    def order(seed: int | None, epoch: int) -> list[int]:
        sampler = DefaultSampler(list(range(100)), True, seed)
        sampler.set_epoch(epoch)
        return list(sampler)

    assert order(1, 0) == order(1, 0) != order(1, 1)
    assert order(1, 0) != order(2, 0)
    assert order(None, 0) == order(0, 0)
    plain = DefaultSampler(NUMBERS, shuffle=False)
    plain.set_epoch(3)
    assert list(plain) == NUMBERS


def test_an_infinite_sampler_is_one_epoch_after_the_other() -> None:
    parts = [list(islice(InfiniteSampler(NUMBERS, True, 3, shard=(i, 3)), 20)) for i in range(3)]
    seen = in_turn(parts)
    for epoch in range(6):
        assert seen[10 * epoch : 10 * epoch + 10] == DefaultSampler(NUMBERS, True, 3).order(epoch).tolist()
    assert list(islice(InfiniteSampler(NUMBERS, shuffle=False), 12)) == [*NUMBERS, 0, 1]


@pytest.mark.parametrize("kind", [DefaultSampler, InfiniteSampler])
def test_a_position_goes_on_with_any_number_of_processes(kind: type[DefaultSampler]) -> None:
    """First two processes, then three, then one: together the order of one that was never interrupted."""
    data = list(range(30))
    whole = list(islice(iter(kind(data, True, 3)), 50))
    seen: list[int] = []
    for count, start, stop in ((2, 0, 8), (3, 8, 20), (1, 20, 25), (2, 25, 29 if kind is DefaultSampler else 47)):
        parts = []
        for index in range(count):
            sampler = kind(data, True, 3, shard=(index, count))
            sampler.set_span(start, stop)
            parts.append(list(sampler))
        seen += in_turn(parts)
    assert seen == whole[: len(seen)]
    assert len(seen) == (29 if kind is DefaultSampler else 47)


def test_a_span_ends_with_the_next() -> None:
    sampler = DefaultSampler(NUMBERS, shuffle=False)
    sampler.set_span(2, 5)
    assert list(sampler) == [2, 3, 4]
    sampler.set_span(7)
    assert list(sampler) == [7, 8, 9]
    sampler.set_span(0)
    assert list(sampler) == NUMBERS


def test_an_order_of_one_s_own() -> None:
    class Backwards(DefaultSampler):
        def order(self, epoch: int) -> list[int]:
            return NUMBERS[::-1]

    parts = [Backwards(NUMBERS, shard=(i, 3)) for i in range(3)]
    assert in_turn([list(part) for part in parts]) == [*NUMBERS[::-1], 9, 8]


@pytest.mark.parametrize("kind", [DefaultSampler, InfiniteSampler])
@pytest.mark.parametrize("length", [8, 12])
def test_an_order_of_one_s_own_has_as_many_indices_as_a_pass(kind: Any, length: int) -> None:
    """The rest of a longer one would never come."""
    backwards = type("Backwards", (kind,), {"order": lambda self, epoch: range(length)[::-1]})
    with refuses(ConfigError, exactly=f"Backwards.order: gave {length} indices, and a pass has num_samples=10"):
        list(islice(backwards(NUMBERS), 10))
    sampler = backwards(NUMBERS)
    sampler.num_samples = length
    assert list(islice(sampler, length)) == list(range(length))[::-1]


# Orders that are computed by index

BILLION = 10**9


def test_the_order_of_a_smaller_dataset_is_torch_s() -> None:
    """Checkpoints and recorded results go by it."""
    for seed, epoch in ((0, 0), (3, 2)):
        sampler = DefaultSampler(range(1000), True, seed)
        sampler.set_epoch(epoch)
        generator = torch.Generator().manual_seed(seed + epoch)
        assert list(sampler) == torch.randperm(1000, generator=generator).tolist()


@pytest.mark.parametrize("kind", [DefaultSampler, InfiniteSampler])
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_billion_samples_take_no_memory(kind: type[DefaultSampler], shuffle: bool) -> None:
    tracemalloc.start()
    sampler = kind(range(BILLION), shuffle, 3, shard=(1, 2))
    sampler.set_span(BILLION - 40_000)
    found = list(islice(sampler, 20_000))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10 * 2**20
    assert len(set(found)) == 20_000
    assert max(found) < BILLION
    assert (found == list(range(BILLION - 39_999, BILLION, 2))) is not shuffle
    sampler.set_span(BILLION - 4, BILLION)
    assert list(sampler) == found[-2:], "entered at its end"


def test_a_large_order_goes_on_with_any_number_of_processes() -> None:
    data = range(2**20 + 5)
    whole = list(islice(DefaultSampler(data, True, 3), 9000))
    parts = []
    for index in range(3):
        sampler = DefaultSampler(data, True, 3, shard=(index, 3))
        sampler.set_span(1000, 9000)
        parts.append(list(sampler))
    assert in_turn(parts) == whole[1000:]


class Growing(Dataset[int]):
    """A dataset with other samples in every epoch."""

    def __init__(self, step: int) -> None:
        self.length, self.step = 6, step

    def set_epoch(self, epoch: int) -> None:
        self.length = 6 + epoch * self.step

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("step", [2, -2])
@pytest.mark.parametrize("kind", ["DefaultSampler", "InfiniteSampler"])
def test_a_dataset_with_another_length_than_its_sampler_knows(kind: str, step: int) -> None:
    """Otherwise what has been added would be left out, and nobody would know."""
    data = TrainData(loader(dict(dataset=Growing(step), batch_size=2, sampler=kind)), 1, seed=0)
    assert sorted(i for (batch,) in data.windows(0, stop=3) for i in batch) == list(range(6))
    says = f"{kind}: its dataset has {6 + step} samples, it had 6; the length must not change"
    with refuses(DataError, exactly=says):
        list(islice(data.windows(1), 1))


def test_an_empty_dataset() -> None:
    assert list(DefaultSampler([], True)) == []
    assert len(DefaultSampler([], True, shard=(0, 2))) == 0


# Random numbers apart from the process's


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_a_random_stream_leaves_the_process_alone() -> None:
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = [draws() for _ in range(3)]
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    stream, found, apart = RandomStream(7), [], []
    for _ in range(3):
        with stream:
            apart.append(draws())
        found.append(draws())
    assert found == expected
    again = RandomStream(7)
    with again:
        assert [draws() for _ in range(3)] == apart
    with RandomStream(2**40):  # NumPy takes 32 bits
        draws()


def test_what_a_foreign_sampler_draws_does_not_depend_on_the_process() -> None:
    for sampler in (
        RandomSampler(NUMBERS),
        RandomSampler(NUMBERS, replacement=True, generator=torch.Generator().manual_seed(1)),
        BatchSampler(SubsetRandomSampler(NUMBERS, generator=torch.Generator()), 3, False),
    ):
        repeatable, seen = Repeatable(sampler), []
        for _ in range(2):
            repeatable.position(11, 0, None)
            seen.append(list(repeatable))
            torch.rand(5)
        assert seen[0] == seen[1]
        repeatable.position(11, 1, 3)
        assert list(repeatable) == seen[0][1:3]
        repeatable.position(12, 0, None)
        assert list(repeatable) != seen[0]
        assert len(repeatable) == len(sampler)


# Dataloaders from a configuration


def test_what_is_left_out() -> None:
    training, evaluation = loader({}), loader({}, training=False)
    assert (training.batch_size, training.num_workers, training.drop_last) == (1, 0, False)
    assert list(chain(*evaluation)) == NUMBERS
    assert sorted(chain(*training)) == NUMBERS
    assert list(chain(*training)) != NUMBERS
    assert loader({"collate_fn": "pseudo_collate"}).collate_fn is pseudo_collate
    assert built_loader(dict(dataset=NUMBERS)).collate_fn is pseudo_collate


@pytest.mark.parametrize(
    "sampler",
    ["DefaultSampler", DefaultSampler, dict(type="DefaultSampler"), dict(type=DefaultSampler, shuffle=True, seed=5)],
)
def test_a_sampler_in_every_spelling(sampler: Any) -> None:
    built = loader(dict(sampler=sampler, batch_size=3))
    assert isinstance(built.sampler, DefaultSampler)
    assert list(chain(*built)) == DefaultSampler(NUMBERS, True, 5).order(0).tolist()


def test_a_dataset_in_every_spelling() -> None:
    class Lazy(Samples):
        inits = 0

        def full_init(self) -> None:
            self.inits += 1

    for dataset in (dict(type=Lazy, length=4), dict(type="tests_lazy", length=4)):
        if dataset["type"] == "tests_lazy":
            from flextrain.core.base.registry import DATASETS

            DATASETS.register_module("tests_lazy", force=True)(Lazy)
        built = loader(dict(dataset=dataset, collate_fn="default_collate"))
        assert isinstance(built.dataset, Lazy)
        assert built.dataset.inits == 1
    assert len(loader(dict(dataset=[1, 2, 3])).dataset) == 3


@pytest.mark.parametrize("count", [1, 2, 3])
def test_evaluation_repeats_nothing(count: int) -> None:
    parts = [list(chain(*loader(dict(batch_size=2), (i, count), training=False))) for i in range(count)]
    assert in_turn(parts) == NUMBERS


def test_a_batch_sampler_gets_the_sampler_and_the_size() -> None:
    built = loader(dict(batch_size=4, drop_last=True, batch_sampler=dict(type=BatchSampler)), (1, 2))
    assert isinstance(built.batch_sampler, BatchSampler)
    assert [len(batch) for batch in built] == [4]
    assert isinstance(built.batch_sampler.sampler, DefaultSampler)
    own = BatchSampler(SequentialSampler(NUMBERS), 5, False)
    assert list(loader(dict(batch_sampler=own))) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


def pad_to(batch: list[int], length: int) -> list[int]:
    return batch + [0] * (length - len(batch))


def test_a_collate_function_with_arguments_can_go_to_a_spawned_worker() -> None:
    built = loader(dict(batch_size=4, collate_fn=dict(type=pad_to, length=6)), training=False)
    assert next(iter(built)) == [0, 1, 2, 3, 0, 0]
    assert pickle.loads(pickle.dumps(built.collate_fn))([1]) == [1, 0, 0, 0, 0, 0]


Point = namedtuple("Point", "x label")


def test_lists_of_different_lengths_are_told_with_advice() -> None:
    with refuses(ConfigError, matches=r'^collate_fn: "ids" of samples .* lengths, 3 and 2; give .*DataCollator'):
        pseudo_collate([{"ids": [1, 2, 3]}, {"ids": [4, 5]}])


@pytest.mark.parametrize(
    "samples, batch",
    [
        ([1, 2], [1, 2]),
        ([(1, "a"), (2, "b")], [[1, 2], ["a", "b"]]),
        ([dict(x=1, n=dict(y="a")), dict(x=2, n=dict(y="b"))], dict(x=[1, 2], n=dict(y=["a", "b"]))),
        ([Point(1, "a"), Point(2, "b")], Point([1, 2], ["a", "b"])),
        (["one", "two"], ["one", "two"]),
    ],
    ids=str,
)
def test_pseudo_collate_stacks_nothing(samples: list[Any], batch: Any) -> None:
    assert pseudo_collate(samples) == batch


def test_pseudo_collate_keeps_tensors_of_different_sizes() -> None:
    a, b = torch.zeros(2), torch.zeros(3)
    batch = pseudo_collate([dict(x=a), dict(x=b)])
    assert batch["x"][0] is a
    assert batch["x"][1] is b


# Only the dataset itself, once it is built, tells


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


class NoItems:
    pass


class Hiding(Sampler[Any]):
    """A batch sampler that keeps its sampler by another name."""

    def __init__(self, sampler: Any, batch_size: int = 2, drop_last: bool = False) -> None:
        self.base = sampler

    def __iter__(self) -> Iterator[Any]:
        return iter(BatchSampler(self.base, 2, False))


def in_batches(kind: Any) -> BatchSampler:
    return BatchSampler(kind(NUMBERS), 2, False)


@pytest.mark.parametrize(
    "cfg, shard, training, says",
    [
        (dict(dataset=dict(type=Stream), sampler="DefaultSampler"), (0, 1), True, "sampler: has no meaning with"),
        (dict(dataset=dict(type=Stream), shuffle=True), (0, 1), True, "shuffle: has no meaning with"),
        (dict(dataset=dict(type=lambda: NoItems())), (0, 1), True, "dataset: NoItems is no dataset"),
        (dict(sampler=DefaultSampler(NUMBERS)), (0, 1), False, "round_up: True would count repeated samples"),
        (dict(batch_sampler=in_batches(DefaultSampler)), (0, 1), False, "round_up: True would count repeated samples"),
        (dict(batch_sampler=in_batches(InfiniteSampler)), (0, 1), False, "sampler: an InfiniteSampler has no end"),
        (DataLoader(NUMBERS, batch_sampler=in_batches(DefaultSampler)), (0, 1), False, "round_up: True would count"),
        (
            dict(batch_sampler=dict(type=Hiding)),
            (0, 1),
            True,
            "batch_sampler: Hiding keeps a DefaultSampler as base, where",
        ),
        (
            DataLoader(NUMBERS, batch_sampler=Hiding(DefaultSampler(NUMBERS))),
            (0, 1),
            True,
            "batch_sampler: Hiding keeps",
        ),
    ],
)
def test_refused_when_built(cfg: Any, shard: tuple[int, int], training: bool, says: str) -> None:
    with refuses(ConfigError, matches=rf"^train_dataloader\.(sampler\.)?{says}"):
        loader(cfg, shard, training)


@pytest.mark.parametrize("built", [False, True], ids=["configuration", "DataLoader"])
def test_workers_that_overtake_each_other_are_refused_in_training(built: bool) -> None:
    """A resumed run would train on some batches twice, and on others never."""
    options: dict[str, Any] = dict(batch_size=2, num_workers=2, in_order=False)
    given = DataLoader(NUMBERS, **options) if built else options  # type: ignore[arg-type]
    with refuses(
        ConfigError,
        exactly="train_dataloader.in_order: False loses and repeats batches when a run is resumed; leave it out",
    ):
        loader(given)
    assert loader(given, training=False).in_order is False
    assert loader(dict(batch_size=2, num_workers=1, in_order=False)).num_workers == 1


# A DataLoader that the user built


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="flextrain")
    return caplog


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_plain_loader_is_split(shuffle: bool, logged: pytest.LogCaptureFixture) -> None:
    plain = DataLoader(NUMBERS, batch_size=3, shuffle=shuffle, collate_fn=list, drop_last=True)
    built = [loader(plain, (i, 2)) for i in range(2)]
    parts = [list(built[i].sampler) for i in range(2)]
    assert sorted(chain(*parts)) == NUMBERS
    assert (in_turn(parts) == NUMBERS) is not shuffle
    assert (built[0].batch_size, built[0].drop_last, built[0].collate_fn) == (3, True, list)
    assert logged.messages[0] == (
        f"train_dataloader: the DataLoader got a DefaultSampler(shuffle={shuffle}) that splits it over 2 processes"
    )


def test_a_plain_loader_for_evaluation_repeats_nothing() -> None:
    plain = DataLoader(NUMBERS, batch_size=3, collate_fn=list)
    assert in_turn([list(chain(*loader(plain, (i, 3), training=False))) for i in range(3)]) == NUMBERS


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "sampler", [SequentialSampler(range(4)), RandomSampler(range(4)), RandomSampler(range(4), num_samples=10)]
)
def test_a_sampler_of_part_of_the_dataset_stays(sampler: Any, training: bool) -> None:
    """torch's samplers may be given another source of indices than the dataset."""
    plain = DataLoader(NUMBERS, batch_size=2, sampler=sampler, collate_fn=list)
    assert {number for batch in loader(plain, training=training) for number in batch} == {0, 1, 2, 3}


def test_a_loader_without_batches_is_split_too() -> None:
    plain = DataLoader(NUMBERS, batch_size=None)
    assert in_turn([[int(i) for i in loader(plain, (i, 2))] for i in range(2)]) == NUMBERS
    data = TrainData(loader(plain), accumulate=3, seed=0)
    assert [[int(i) for i in window] for window in data.windows(0, 1, 3)] == [[3, 4, 5], [6, 7, 8]]


def test_the_loader_keeps_what_it_was_built_with() -> None:
    def init(worker: int) -> None:
        pass

    plain = DataLoader(
        NUMBERS, batch_size=2, num_workers=1, timeout=7, worker_init_fn=init, prefetch_factor=3, pin_memory=False,
        persistent_workers=True, multiprocessing_context="fork", in_order=False,
    )  # fmt: skip
    built = loader(plain)
    for name in ("num_workers", "timeout", "worker_init_fn", "prefetch_factor", "pin_memory", "persistent_workers",
                 "collate_fn", "in_order", "multiprocessing_context"):  # fmt: skip
        assert getattr(built, name) == getattr(plain, name)


# Windows


def windows(data: TrainData, *args: Any) -> list[list[list[int]]]:
    return [list(window) for window in data.windows(*args)]


@pytest.mark.parametrize("accumulate", [1, 2, 3, 5])
def test_windows_from_any_position(accumulate: int) -> None:
    data = TrainData(loader(dict(batch_size=3)), accumulate, seed=0)
    for epoch in range(2):
        whole = windows(data, epoch)
        assert len(whole) == data.epoch_length == -(-4 // accumulate)
        assert [len(window) for window in whole[:-1]] == [accumulate] * (len(whole) - 1)
        assert len(whole[-1]) == 4 - accumulate * (len(whole) - 1)
        assert Counter(chain(*chain(*whole))) == Counter(NUMBERS)
        for start in range(len(whole) + 1):
            assert windows(data, epoch, start) == whole[start:]
            for stop in range(start, len(whole) + 1):
                assert windows(data, epoch, start, stop) == whole[start:stop]
    assert windows(data, 0) != windows(data, 1)


@pytest.mark.parametrize(
    "cfg",
    [
        dict(batch_size=3),
        dict(batch_size=3, batch_sampler=BatchSampler),
        dict(sampler="InfiniteSampler", batch_size=3),
        DataLoader(NUMBERS, batch_size=3, sampler=RandomSampler(NUMBERS, replacement=True)),
    ],
    ids=["sampler", "batch-sampler", "infinite", "foreign"],
)
def test_nothing_is_read_outside_of_the_span(cfg: Any, tmp_path: Path) -> None:
    samples = Samples(10, tmp_path / "read")
    if isinstance(cfg, DataLoader):
        cfg = DataLoader(samples, batch_size=3, sampler=cfg.sampler, collate_fn=list)
        built = loader(cfg)
    else:
        built = loader({**cfg, "dataset": samples})
    data = TrainData(built, accumulate=1, seed=0)
    given = [sample["index"] for window in data.windows(1, 1, 3) for sample in window[0]]
    assert samples.read() == given
    assert len(given) == 6


def test_a_stream_is_read_up_to_its_stop(tmp_path: Path) -> None:
    samples = Samples(10, tmp_path / "read")

    class Endless(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            while True:
                yield samples[random.randrange(10)]

    data = TrainData(loader(dict(dataset=Endless(), batch_size=2)), accumulate=2, seed=0)
    given = [sample["index"] for window in data.windows(0, 1, 3) for batch in window for sample in batch]
    assert samples.read()[4:] == given
    assert len(given) == 8
    assert data.epoch_length is None


def test_reading_leaves_the_process_s_random_state_alone() -> None:
    torch.manual_seed(4)
    before = torch.get_rng_state()
    for cfg in (dict(batch_size=3), DataLoader(NUMBERS, sampler=RandomSampler(NUMBERS, replacement=True))):
        windows(TrainData(loader(cfg), 1, seed=0), 0)
        assert torch.equal(torch.get_rng_state(), before)


class WorkerSeeds(TensorDataset):
    """What a dataset may seed a generator of its own with."""

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info is not None
        return info.seed


@pytest.mark.processes
def test_workers_are_seeded_by_seed_and_epoch() -> None:
    def seeds(seed: int, epoch: int, start: int = 0) -> list[int]:
        built = loader(dict(dataset=WorkerSeeds(torch.zeros(4)), num_workers=2))
        return sorted(int(batch[0]) for batch in chain(*TrainData(built, 1, seed).windows(epoch, start)))

    first = seeds(1, 0)
    assert len(set(first)) == 2
    assert first == seeds(1, 0)
    assert not set(first) & set(seeds(1, 1))
    assert not set(first) & set(seeds(2, 0))
    assert not set(first) & set(seeds(1, 0, start=1)), "not the first ones again when the epoch goes on"


def test_another_seed_for_the_order_unless_the_sampler_has_its_own() -> None:
    follows, own = loader({}), loader(dict(sampler=dict(type="DefaultSampler", seed=9)))
    for built, expected in ((follows, 6), (own, 9)):
        data = TrainData(built, 1, seed=5)
        data.use_seed(6)
        assert built.sampler.seed == expected  # type: ignore[attr-defined]
        assert data.seed == 6


def test_the_epoch_reaches_the_sampler_inside_a_batch_sampler() -> None:
    data = TrainData(loader(dict(batch_size=5, batch_sampler=BatchSampler)), 1, seed=0)
    assert sorted(chain(*chain(*windows(data, 0)))) == NUMBERS
    assert windows(data, 0) != windows(data, 1)


@pytest.mark.parametrize(
    "fill, expected", [(True, [[0, 3, 6], [1, 4, 0], [2, 5, 1]]), (False, [[0, 3, 6], [1, 4], [2, 5]])]
)
def test_processes_without_one_of_the_last_items_repeat_the_first_ones(fill: bool, expected: list[list[int]]) -> None:
    divided = [DividedSampler(range(7), (index, 3), fill) for index in range(3)]
    assert [list(one) for one in divided] == expected
    assert [len(one) for one in divided] == [len(one) for one in expected]


# num_batch_per_epoch: short epochs of the first samples


class Named(list[int]):
    metainfo = {"classes": ("a", "b")}


class One(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield 1


def short(shard: tuple[int, int] = (0, 1), **cfg: Any) -> Any:
    given = dict(dataset=Named(range(20)), collate_fn=list, batch_size=3) | cfg
    return built_loader(given, shard)


@pytest.mark.parametrize("count", [1, 2])
def test_every_process_has_so_many_batches_of_the_first_samples(count: int) -> None:
    batches = [list(short((i, count), num_batch_per_epoch=2)) for i in range(count)]
    assert [len(own) for own in batches] == [2] * count
    assert sorted(i for own in batches for batch in own for i in batch) == list(range(6 * count))


def test_a_short_dataset_stays_as_it_is() -> None:
    assert len(short(num_batch_per_epoch=100)) == len(short()) == 7


def test_an_order_of_the_whole_dataset_does_not_lead_beyond_the_first_samples(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"number": {number}}}\n' for number in range(100)))
    source = dict(type="JsonlFiles", paths=str(path))
    own = list(short(dataset=source, num_batch_per_epoch=2))
    assert sorted(row["number"] for batch in own for row in batch) == list(range(6))
    assert hasattr(short(dataset=source, num_batch_per_epoch=100).dataset, "order_of_pass"), (
        "all of it is left as it is"
    )


def test_the_rest_of_the_dataset_is_there() -> None:
    dataset = pickle.loads(pickle.dumps(short(num_batch_per_epoch=1).dataset))
    assert (len(dataset), dataset.metainfo, dataset[2]) == (3, Named.metainfo, 2)


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        (dict(num_batch_per_epoch=0), "train_dataloader.num_batch_per_epoch: 0 is not allowed, give 1 or more"),
        (dict(num_batch_per_epoch="2"), "train_dataloader.num_batch_per_epoch: '2' is not allowed, give 1 or more"),
        (
            dict(num_batch_per_epoch=2, sampler=RandomSampler(range(20))),
            "train_dataloader.num_batch_per_epoch: has no effect on a sampler that is already built, give dict(type=...)",
        ),
        (
            dict(num_batch_per_epoch=2, dataset=One()),
            "train_dataloader.num_batch_per_epoch: needs a dataset with a length, One has none",
        ),
    ],
)
def test_what_cannot_be_honoured_raises(cfg: dict[str, Any], message: str) -> None:
    with refuses(ConfigError, exactly=message):
        short(**cfg)
