"""Windows of DefaultSampler(round_up=False): as many on every process, each sample once, and factors that fit."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import pytest
from torch.utils.data import BatchSampler

from flextrain import ConfigError
from flextrain.runner.data.dataloaders import TrainData
from flextrain.runner.data.readers import Counted
from flextrain.runner.data.samplers import DefaultSampler

from .training import built_loader, refuses

EXACT = dict(type="DefaultSampler", round_up=False)


def data_of(length: int, index: int, count: int, accumulate: int = 1, **options: Any) -> TrainData:
    cfg = {"dataset": list(range(length)), "collate_fn": list, "sampler": EXACT, **options}
    return TrainData(built_loader(cfg, (index, count)), accumulate, seed=5, shard=(index, count))


def updates(
    length: int, count: int, accumulate: int, position: int = 0, **options: Any
) -> list[list[tuple[list[list[int]], Counted | None]]]:
    """What each process has in each update of what is left of an epoch."""
    found = []
    for index in range(count):
        data = data_of(length, index, count, accumulate, **options)
        start = data.resume_at(2, position) if position else 0
        windows = [(window, data.counted) for window in data.windows(2, start)]
        assert data.length(2) == start + len(windows)
        assert data.counted is None, "no window is under way"
        found.append(windows)
    assert len({len(windows) for windows in found}) == 1, "every process has as many updates"
    return [list(each) for each in zip(*found, strict=True)]


CASES = list(product((1, 2, 3, 5, 10, 11), (1, 2, 3, 4), (1, 2, 3), (1, 2, 4)))


@pytest.mark.parametrize("shuffle", [True, False])
def test_each_sample_counts_once_with_the_same_weight(shuffle: bool) -> None:
    """At every position of an epoch, on any number of processes."""
    sampler = {**EXACT, "shuffle": shuffle}
    for length, count, size, accumulate in CASES:
        order = list(DefaultSampler(range(length), shuffle, 5, shard=(0, 1)).order(2)[range(length)])
        for position in {0, length // 2, length - 1}:
            stride, place = count * size * accumulate, position
            for parts in updates(length, count, accumulate, position, batch_size=size, sampler=sampler):
                assert len({len(window) for window, _ in parts}) == 1, "every process has as many micro-batches"
                weights: Counter[int] = Counter()
                for window, counted in parts:
                    numbers = [len(batch) for batch in window] if counted is None else counted.own
                    factors = [1 / len(window)] * len(window) if counted is None else counted.factors
                    for batch, number, factor in zip(window, numbers, factors, strict=True):
                        assert len(batch) == max(number, 1)
                        if number:
                            weights.update(dict.fromkeys(batch, factor / number / count))
                        else:
                            assert factor == 0
                            assert batch is window[-1], "a filler is the last micro-batch"
                expected = order[place : place + stride]
                assert weights == pytest.approx(dict.fromkeys(expected, 1 / len(expected)))
                place += len(expected)
            assert place == length


def test_counts_are_kept_only_where_they_differ() -> None:
    for count, accumulate in ((1, 1), (2, 1), (2, 2), (3, 1)):
        each = [[c for _, c in parts] for parts in updates(24, count, accumulate, batch_size=2)]
        assert each == [[None] * count] * len(each)
    *earlier, last = updates(11, 2, 2, batch_size=2)
    assert all(counted is None for parts in earlier for _, counted in parts)
    assert [counted for _, counted in last] == [Counted((2,), 3, 2, False), Counted((1,), 3, 2, False)]


def test_who_has_a_filler() -> None:
    (parts,) = updates(5, 2, 2, batch_size=2)
    assert [counted for _, counted in parts] == [Counted((2, 1), 5, 2, True), Counted((2, 0), 5, 2, True)]
    (parts,) = updates(2, 4, 1, batch_size=3)
    assert [counted and counted.own for _, counted in parts] == [(1,), (1,), (0,), (0,)]
    assert all(counted and counted.has_filler for _, counted in parts)


def test_without_the_last_batches_all_are_full() -> None:
    for length, count, size, accumulate in CASES:
        found = updates(length, count, accumulate, batch_size=size, drop_last=True) if size <= length else []
        seen = Counter(i for parts in found for window, _ in parts for batch in window for i in batch)
        assert all(counted is None for parts in found for _, counted in parts)
        assert sum(seen.values()) == len(seen) == (length // (count * size) * count * size if size <= length else 0)


def test_evaluation_with_the_same_sampler_has_no_filler() -> None:
    data = data_of(3, 1, 2)
    assert len(list(data.windows(0))) == 2
    sampler = data.loader.sampler
    sampler.set_span(0)
    from flextrain.runner.data.readers import Feed

    assert len(list(Feed(data.loader, (1, 2)).batches(0, 0))) == 1
    assert len(list(data.windows(1))) == 2, "and training has it again"


class Backwards(BatchSampler):
    """The batches of another sampler, last sample first."""


class OwnOrder(DefaultSampler):
    def __iter__(self) -> Any:
        return iter(range(self.index, self.num_samples, self.count))


@pytest.mark.parametrize(
    "options, name",
    [
        (dict(batch_sampler=dict(type=Backwards)), "Backwards"),
        (dict(sampler=dict(type=OwnOrder, round_up=False)), "OwnOrder"),
    ],
)
def test_batches_that_cannot_be_counted_are_refused(options: dict[str, Any], name: str) -> None:
    with refuses(
        ConfigError,
        exactly="train_dataloader.sampler.round_up: False gives 11 samples unevenly to 2 processes, and "
        f"{name} has an order of its own, whose batches cannot be counted before; leave round_up out",
    ):
        data_of(11, 0, 2, **options)
    data_of(10, 0, 2, **options)
