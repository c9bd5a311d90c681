"""Streams of Hugging Face's datasets, resumed once, twice and three times: every sample comes as in a run without an end in between."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("datasets")

from datasets import Dataset, IterableDataset, concatenate_datasets, interleave_datasets

from flextrain import BaseMetric, CheckpointError, ConfigError, FlexibleRunner
from flextrain.runner.data.streams import hugging_face
from flextrain.runner.data.streams.divided_streams import divided, divided_passes
from flextrain.runner.data.streams.hugging_face import begins_anew, why_read_again
from flextrain.runner.data.user_loaders import why_not_by_state
from flextrain.testing import WorkerGroup

from ..hugging_face.test_datasets import Sum, train
from .training import change_values, data_workers, log_lines, refuses

pytestmark = pytest.mark.filterwarnings("ignore:.*shuffle buffer.*")


def rows(count: int = 24, shards: int = 4, first: int = 0) -> Any:
    data = Dataset.from_dict({"input_ids": [[first + number, 3] for number in range(count)]})
    return data.to_iterable_dataset(num_shards=shards)


def generated(shards: list[int]) -> Any:
    for shard in shards:
        for number in range(6):
            yield {"input_ids": [10 * shard + number, 3]}


def double(batch: Any) -> Any:
    return {"input_ids": [[10 * first + half, last] for first, last in batch["input_ids"] for half in (0, 1)]}


def is_kept(sample: Any) -> bool:
    return bool(sample["input_ids"][0] % 3)


def same(sample: Any) -> Any:
    return sample


def two(**options: Any) -> Any:
    return interleave_datasets([rows(16, 2), rows(24, 4, 100)], seed=3, **options)


# Those that continue from their state, and those that are read again.
BY_STATE: dict[str, Callable[[], Any]] = {
    "rows": rows,
    "generator": lambda: IterableDataset.from_generator(generated, gen_kwargs={"shards": [0, 1, 2, 3]}),
    "map": lambda: rows().map(same),
    "batched map": lambda: rows(12).map(double, batched=True, batch_size=5),
    "filter": lambda: rows(48).filter(is_kept),
    "interleaved": lambda: two(),
    "interleaved by chance": lambda: two(probabilities=[0.3, 0.7], stopping_strategy="all_exhausted"),
    "one after the other": lambda: concatenate_datasets([rows(8, 2), rows(24, 4, 100)]),
}
AGAIN: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: rows().shuffle(seed=1, buffer_size=8),
    "map after shuffling": lambda: rows().shuffle(seed=1, buffer_size=8).map(same),
    "interleaved of shuffled": lambda: interleave_datasets(
        [rows(16, 2).shuffle(seed=2, buffer_size=5), rows(24, 4, 100)]
    ),
}
STREAMS = BY_STATE | AGAIN
GOES_ON = pytest.mark.skipif(not begins_anew(), reason="datasets before 3.4 are all read again")


def in_parts(folder: Path, make: Callable[[], Any], ends: list[int], **loader: Any) -> list[int]:
    """The samples of a run that ends after these updates, and is resumed each time."""
    found: list[int] = []
    for begin, end in pairwise((0, *ends)):
        found += train(folder, make().with_format("torch"), updates=end, resume=begin > 0, **loader)
    return found


def train_in_parts(folder: Path, name: str, ends: list[int], workers: int = 0) -> list[int]:
    return in_parts(folder, STREAMS[name], ends, **data_workers(workers))


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_that_is_resumed_three_times(tmp_path: Path, name: str) -> None:
    """Through the end of a pass too, and right after one update more."""
    whole = train_in_parts(tmp_path / "whole", name, [15])
    assert len(whole) == 30
    assert train_in_parts(tmp_path / "parts", name, [3, 4, 9, 15]) == whole


@GOES_ON
@pytest.mark.parametrize("saved", [3, 12], ids=["within a pass", "at its end"])
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=[pytest.mark.processes, pytest.mark.full])])
def test_an_older_checkpoint_has_the_state_of_the_stream_alone(tmp_path: Path, saved: int, workers: int) -> None:
    whole = train_in_parts(tmp_path / "whole", "rows", [15], workers)
    first = train_in_parts(tmp_path / "parts", "rows", [saved], workers)
    change_values(tmp_path / "parts" / f"iter_{saved}", as_written_before_passes_were_kept)
    rest = train(tmp_path / "parts", rows().with_format("torch"), updates=15, resume=True, **data_workers(workers))
    assert first + rest == whole


def as_written_before_passes_were_kept(values: Any) -> None:
    """Put the stream's state in the place of that of its passes."""
    changed: list[bool] = []

    def changed_to(packed: Any) -> Any:
        if isinstance(packed, dict) and [key for key, _ in packed.get("dict", ())] == ["state", "stage"]:
            changed.append(True)
            return packed["dict"][0][1]
        if isinstance(packed, dict):
            return {key: changed_to(item) for key, item in packed.items()}
        return [changed_to(item) for item in packed] if isinstance(packed, list) else packed

    values["loader"] = changed_to(values["loader"])
    assert changed


@pytest.mark.full
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("name", STREAMS)
def test_it_is_so_with_workers(tmp_path: Path, name: str, workers: int) -> None:
    whole = train_in_parts(tmp_path / "whole", name, [15], workers)
    assert train_in_parts(tmp_path / "parts", name, [3, 4, 9, 15], workers) == whole


@pytest.mark.full
def test_it_is_so_with_workers_that_are_no_forks(tmp_path: Path) -> None:
    whole, parts = (
        in_parts(tmp_path / str(len(ends)), rows, ends, num_workers=2, multiprocessing_context="spawn")
        for ends in ([6], [2, 3, 6])
    )
    assert parts == whole


@pytest.mark.distributed
@pytest.mark.full
@pytest.mark.parametrize("readers", [0, 2])
@pytest.mark.parametrize("name", ["rows", "interleaved by chance", "shuffled"])
def test_it_is_so_on_two_processes(workers2: WorkerGroup, tmp_path: Path, name: str, readers: int) -> None:
    whole = workers2.run(train_in_parts, tmp_path / "whole", name, [8], readers)
    assert workers2.run(train_in_parts, tmp_path / "parts", name, [2, 3, 5, 8], readers) == whole


@pytest.mark.distributed
@pytest.mark.full
@pytest.mark.parametrize("name", ["rows", "shuffled"])
def test_another_number_of_processes_is_refused(workers2: WorkerGroup, tmp_path: Path, name: str) -> None:
    workers2.run(train_in_parts, tmp_path, name, [2])
    with refuses(CheckpointError, matches=r"in the middle of an epoch with shards=2, it is 1 now"):
        train(tmp_path, STREAMS[name]().with_format("torch"), updates=4, resume=True)


# Operations that give other samples of some of the shards than of all of them: a process must not read its shards only.
OF_THE_WHOLE: dict[str, Callable[[], Any]] = {
    "taken": lambda: rows().take(7),
    "skipped": lambda: rows().skip(7),
    "taken after shuffling": lambda: rows().shuffle(seed=1, buffer_size=8).take(7),
    "interleaved": lambda: interleave_datasets([rows(6, 2), rows(24, 4, 100)]),
}


class Evaluated(BaseMetric):
    """The first token of every sample."""

    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results += data_batch["input_ids"][:, 0].tolist()

    def compute_metrics(self, results: list[int]) -> dict[str, Any]:
        return {"samples": sorted(results)}


def evaluate_stream(folder: Path, name: str, readers: int = 0) -> list[int]:
    loader = dict(batch_size=2, dataset=OF_THE_WHOLE[name]().with_format("torch"), collate_fn="default_collate")
    runner = FlexibleRunner(
        model=dict(type=Sum), work_dir=folder, log_level="ERROR", val_cfg=dict(), val_evaluator=Evaluated(),
        val_dataloader={**loader, **data_workers(readers)},
    )  # fmt: skip
    found: list[int] = runner.val()["samples"]
    runner.close()
    return found


def train_stream_of_the_whole(folder: Path, name: str, ends: list[int], readers: int = 0) -> list[int]:
    return in_parts(folder, OF_THE_WHOLE[name], ends, **data_workers(readers))


@pytest.mark.distributed
@pytest.mark.parametrize("name", OF_THE_WHOLE)
def test_a_count_of_samples_is_that_of_all_shards(workers2: WorkerGroup, tmp_path: Path, name: str) -> None:
    """Two processes evaluate and train the samples of one, though the shards could be divided."""
    expected = [int(sample["input_ids"][0]) for sample in OF_THE_WHOLE[name]()]
    assert workers2.run(evaluate_stream, tmp_path, name) == [sorted(expected)] * 2
    if name != "interleaved":
        updates = len(expected) // 4
        whole = workers2.run(train_stream_of_the_whole, tmp_path / "whole", name, [updates])
        assert sorted(chain.from_iterable(whole)) == sorted(expected[: 4 * updates])


@GOES_ON
@pytest.mark.distributed
@pytest.mark.full
@pytest.mark.parametrize("readers", [0, 2])
def test_a_stream_that_counts_goes_on(workers2: WorkerGroup, tmp_path: Path, readers: int) -> None:
    whole = workers2.run(train_stream_of_the_whole, tmp_path / "whole", "skipped", [8], readers)
    assert workers2.run(train_stream_of_the_whole, tmp_path / "parts", "skipped", [2, 3, 5, 8], readers) == whole


WITHOUT_SEED: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: rows().shuffle(buffer_size=8),
    "a map after it": lambda: rows().shuffle(buffer_size=8).map(same),
    "by chance": lambda: interleave_datasets([rows(16, 2), rows(24, 4, 100)], probabilities=[0.3, 0.7]),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", WITHOUT_SEED)
def test_an_order_without_a_seed_is_refused_on_several_processes(name: str, training: bool) -> None:
    """Each would have another order, and keep its part of that."""
    make = divided_passes if training else partial(divided, training=False)
    make = partial(make, asked=None, where="loader", logger=logging.getLogger("flextrain"))
    with refuses(
        ConfigError, matches=r"loader.dataset: .* without a seed .* each of the 2 processes has another order"
    ):
        make(WITHOUT_SEED[name](), shard=(0, 2))
    with log_lines() as lines:
        make(WITHOUT_SEED[name](), shard=(0, 1))
    assert any("a resumed run has another order" in line for line in lines) is training


@pytest.mark.parametrize("name", STREAMS)
def test_which_are_read_again_is_known(name: str) -> None:
    assert (why_read_again(STREAMS[name]()) is not None) is (name in AGAIN or not begins_anew())


@GOES_ON
def test_a_loader_of_the_user_s_is_not_believed_either(tmp_path: Path) -> None:
    """torchdata's has the stream's state, without what is in the buffer."""
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def trained(folder: str, ends: list[int]) -> list[int]:
        found: list[int] = []
        for begin, end in pairwise((0, *ends)):
            loader = torchdata.StatefulDataLoader(STREAMS["shuffled"]().with_format("torch"), batch_size=2)
            found += train_loader(tmp_path / folder, loader, end, begin > 0)
        return found

    assert trained("parts", [3, 5, 9]) == trained("whole", [9])
    assert why_not_by_state(torchdata.StatefulDataLoader(STREAMS["rows"](), num_workers=1)) is None
    of_two = torchdata.StatefulDataLoader(STREAMS["rows"](), num_workers=2)
    assert "a worker that has not read since it was resumed" in why_not_by_state(of_two)
    gc.collect()  # the threads of a stream that was left in the middle end with its generator


def train_loader(folder: Path, loader: Any, updates: int, resume: bool) -> list[int]:
    from flextrain import FlexibleRunner

    from ..hugging_face.test_datasets import Sum

    runner = FlexibleRunner(
        model=Sum, work_dir=folder, train_dataloader=loader, optim_wrapper=dict(optimizer=dict(type="SGD", lr=1e-3)),
        train_cfg=dict(by_epoch=False, max_iters=updates), resume=resume, log_level="ERROR",
        default_hooks=dict(checkpoint=dict(by_epoch=False, interval=1)),
    )  # fmt: skip
    model: Any = runner.train()
    runner.close()
    return list(model.seen)


@GOES_ON
def test_the_log_says_why_it_is_read_again(tmp_path: Path) -> None:
    with log_lines(20) as lines:
        train(tmp_path, STREAMS["shuffled"]().with_format("torch"), log_level="INFO")
    assert any(
        "reads the stream again from its beginning, its shuffle buffer is not in its state" in line for line in lines
    )


@GOES_ON
def test_a_version_that_begins_anew_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """datasets 5.0: https://github.com/huggingface/datasets/issues/8308."""
    load = IterableDataset.load_state_dict

    def load_and_stand_still(self: Any, state: Any) -> None:
        load(self, state)
        self.state_dict = lambda: rows().state_dict()

    assert why_read_again(rows()) is None
    monkeypatch.setattr(IterableDataset, "load_state_dict", load_and_stand_still)
    hugging_face._advances.cache_clear()
    assert "begins anew when it goes on for the second time" in str(why_read_again(rows()))
    monkeypatch.undo()
    hugging_face._advances.cache_clear()
