"""``num_batch_per_epoch``: short epochs of the first samples, on any number of processes."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import IterableDataset, RandomSampler

from flextrain import ConfigError

from .training import built_loader, refuses


class Named(list[int]):
    metainfo = {"classes": ("a", "b")}


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield 1


def loader(shard: tuple[int, int] = (0, 1), **cfg: Any) -> Any:
    given = dict(dataset=Named(range(20)), collate_fn=list, batch_size=3) | cfg
    return built_loader(given, shard)


@pytest.mark.parametrize("count", [1, 2])
def test_every_process_has_so_many_batches_of_the_first_samples(count: int) -> None:
    batches = [list(loader((i, count), num_batch_per_epoch=2)) for i in range(count)]
    assert [len(own) for own in batches] == [2] * count
    assert sorted(i for own in batches for batch in own for i in batch) == list(range(6 * count))


def test_a_short_dataset_stays_as_it_is() -> None:
    assert len(loader(num_batch_per_epoch=100)) == len(loader()) == 7


def test_the_rest_of_the_dataset_is_there() -> None:
    dataset = pickle.loads(pickle.dumps(loader(num_batch_per_epoch=1).dataset))
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
            dict(num_batch_per_epoch=2, dataset=Endless()),
            "train_dataloader.num_batch_per_epoch: needs a dataset with a length, Endless has none",
        ),
    ],
)
def test_what_cannot_be_honoured_raises(cfg: dict[str, Any], message: str) -> None:
    with refuses(ConfigError, exactly=message):
        loader(**cfg)
