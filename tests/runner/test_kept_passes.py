"""Streams with a state continue with the next sample wherever they were saved, whichever way they begin a pass."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from itertools import chain, islice, product
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from flextrain.core.base.errors import DataError
from flextrain.runner.data.dataloaders import TrainData
from flextrain.runner.data.streams.divided_streams import KeptPasses

from .training import built_loader, refuses

pytestmark = pytest.mark.usefixtures("quick")


class Ending(IterableDataset[Any]):
    """At its end its state says so; the next pass begins anew. Samples are 100 * epoch + number; workers have their own."""

    position = begin = epoch = 0

    def __init__(self, *lengths: int) -> None:
        self.lengths = lengths

    def of_worker(self) -> tuple[int, int]:
        worker = get_worker_info()
        number = 0 if worker is None else worker.id
        return 1000 * number, self.lengths[number]

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        first, length = self.of_worker()
        self.position, self.begin = self.begin, 0
        while self.position < length:
            self.position += 1
            yield first + 100 * self.epoch + self.position - 1

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = self.position = state["position"]
        self.epoch = state["epoch"]


class Resetting(Ending):
    """At its end its state says that it begins."""

    def __iter__(self) -> Iterator[int]:
        first, length = self.of_worker()
        while self.position < length:
            self.position += 1
            yield first + 100 * self.epoch + self.position - 1
        self.position = 0


class Late(Ending):
    """Its state is where it was restored only after the next sample, like that of Hugging Face's streams."""

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin, self.epoch = state["position"], state["epoch"]


class Live(Ending):
    """Its state is what it works with, and not a copy; so is what it was given."""

    def __init__(self, *lengths: int) -> None:
        super().__init__(*lengths)
        self.now: dict[str, Any] = {"position": [0], "epoch": 0}

    def set_epoch(self, epoch: int) -> None:
        self.now["epoch"] = epoch

    def __iter__(self) -> Iterator[int]:
        first, length = self.of_worker()
        while self.now["position"][0] < length:
            self.now["position"][0] += 1
            yield first + 100 * self.now["epoch"] + self.now["position"][0] - 1
        self.now["position"][0] = 0

    def state_dict(self) -> dict[str, Any]:
        return self.now

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.now = state


def data(source: Ending, shard: tuple[int, int], batch: int, **loader: Any) -> TrainData:
    given = dict(dataset=source, batch_size=batch, collate_fn=list, shard=True, **loader)
    return TrainData(built_loader(given, shard, True), 1, seed=0, shard=shard)


def read(own: TrainData, passes: int, epoch: int = 0, start: int = 0) -> Iterator[tuple[int, int, list[int]]]:
    """Yield the epoch, the number of batches of it so far, and the batch."""
    for number in range(epoch, passes):
        for done, (batch,) in enumerate(own.windows(number, start), start + 1):
            yield number, done, batch
        start = 0


def check_every_cut(make: Any, passes: int = 3) -> list[list[int]]:
    """Return the batches of a whole run, which those of a run are that was saved and resumed twice, wherever that was.

    A batch comes between the two, so that not every worker has read one.
    """
    whole = list(read(make(), passes))
    for cut in range(1, len(whole)):
        found: list[tuple[int, int, list[int]]] = []
        saved = None
        for more in (cut, 1, len(whole)):
            own = make()
            if saved is not None:
                own.load_loader_state(saved, found[-1][1], begins=False)
            reading = read(own, passes, *found[-1][:2]) if found else read(own, passes)
            found += islice(reading, more)
            saved = json.loads(json.dumps(own.loader_state()))
            reading.close()
            own.close()
        assert found == whole, f"saved after {cut} batches"
    return [batch for _, _, batch in whole]


@pytest.mark.parametrize("kind", [Ending, Resetting, Late, Live])
@pytest.mark.parametrize("batch", [2, 3, 4, 5, 7])
@pytest.mark.parametrize("shard", [(0, 1), (0, 2), (1, 2), (1, 3), (2, 3)])
def test_every_position_of_every_pass(kind: type[Ending], batch: int, shard: tuple[int, int]) -> None:
    """The last samples of a pass too, which some processes repeat: 7 samples are not divided evenly."""
    index, count = shard
    found = check_every_cut(lambda: data(kind(7), shard, batch))
    own = list(range(index, 7, count))
    own += [6] * (len(own) < len(range(0, 7, count)))
    assert list(chain(*found)) == [100 * epoch + number for epoch in range(3) for number in own]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("keeps", "kind"),
    [
        *product([False, True], [Ending, Resetting, Late]),
        pytest.param(False, Live, marks=pytest.mark.full),
        (True, Live),
    ],
)
def test_workers_whose_shares_are_unequal(kind: type[Ending], keeps: bool) -> None:
    """A worker that has ended its pass does not begin anew within it; one that is kept is told the next epoch."""
    pytest.importorskip("torchdata")
    found = check_every_cut(lambda: data(kind(2, 5), (0, 1), 2, num_workers=2, persistent_workers=keeps), passes=2)
    numbers = [*range(2), *range(1000, 1005)]
    assert sorted(chain(*found)) == sorted(100 * epoch + number for epoch in range(2) for number in numbers)


@pytest.mark.parametrize("kind", [Ending, Resetting, Late, Live])
@pytest.mark.parametrize("resumed", [False, True])
def test_a_pass_that_an_exception_has_ended_goes_on(kind: type[Ending], resumed: bool) -> None:
    """Where training goes on in the same process, as it may after Ctrl-C in a notebook."""
    whole = list(read(data(kind(7), (0, 1), 1), 2))
    own, begin = data(kind(7), (0, 1), 1), 0
    if resumed:
        list(islice(read(own, 2), begin := 2))
        saved, own = own.loader_state(), data(kind(7), (0, 1), 1)
        own.load_loader_state(saved, begin, begins=False)
    for end in (begin + 2, begin + 3, len(whole)):
        reading = read(own, 2, 0, begin)
        assert list(islice(reading, end - begin)) == whole[begin:end]
        reading.close()
        begin = end


def test_a_pass_in_which_an_update_was_not_finished_does_not_go_on() -> None:
    """Its batch was read, and the stream cannot go back."""
    own = data(Resetting(7), (0, 1), 1)
    list(islice(read(own, 1), 3))
    with refuses(DataError, exactly="train_dataloader: Resetting was left after 3 batches, of which 2 were trained on, and cannot go back; "
        "runner.resume(path) goes on from a checkpoint"):  # fmt: skip
        next(read(own, 1, 0, 2))


def test_a_worker_that_is_no_fork_has_a_copy() -> None:
    """At the beginning, and restored."""
    whole = KeptPasses(Late(7))
    assert list(pickle.loads(pickle.dumps(whole))) == list(range(7))
    list(islice(whole, 3))
    other = KeptPasses(Late(7))
    other.load_state_dict(whole.state_dict())
    assert list(pickle.loads(pickle.dumps(other))) == list(range(3, 7))


class BySeedOfWorker(IterableDataset[Any]):
    """Shuffles with a generator of its own, which it seeds with its worker's seed."""

    def __iter__(self) -> Iterator[int]:
        worker: Any = get_worker_info()
        return iter(torch.randperm(12, generator=torch.Generator().manual_seed(worker.seed)).tolist())


@pytest.mark.processes
def test_workers_of_processes_that_divide_a_stream_have_the_same_seeds() -> None:
    """Else their orders differ, and every second sample of each is neither all nor each once."""
    found = []
    for index in range(2):
        given = dict(dataset=BySeedOfWorker(), batch_size=2, collate_fn=list, num_workers=1, shard=True)
        own = TrainData(built_loader(given, (index, 2), True), 1, seed=0, shard=(index, 2))
        found += [sample for _, _, batch in read(own, 1) for sample in batch]
    assert sorted(found) == list(range(12))
