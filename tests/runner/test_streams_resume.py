"""Streams resume with the next sample on any number of processes and workers; and what is no longer the same is named."""

from __future__ import annotations

import json
import logging
import os
import sys
from itertools import chain, islice, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    default_collate,
)

from flextrain import CheckpointError, ConfigError
from flextrain.data import Mixture, PackedTokens
from flextrain.runner import build_dataloader
from flextrain.runner.data.dataloaders import TrainData
from flextrain.runner.data.readers import loader_of_stream
from flextrain.runner.data.streams.mixture import MixtureSchedule
from flextrain.runner.data.streams.packing import GROUP
from flextrain.testing import WorkerGroup

from .test_elastic import on, setting, train
from .training import DDP, make_runner, refuses, validation

pytestmark = pytest.mark.usefixtures("quick")


def noisy(sample: Any) -> Any:
    """Augmentation: two numbers that identify a draw."""
    return [
        *np.ravel(sample["input_ids"] if isinstance(sample, dict) else sample).tolist(),
        float(torch.rand(())),
        np.random.rand(),
    ]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Shards of JSON lines, and two of tokens."""
    for number, (start, stop) in enumerate([(0, 5), (5, 5), (5, 6), (6, 19)]):
        (tmp_path / f"{number}.jsonl").write_text("".join(f"{value}\n" for value in range(start, stop)))
        np.arange(100 * number, 100 * number + 37 * number, dtype=np.uint16).tofile(tmp_path / f"{number}.bin")
    return tmp_path


def dataset(kind: str, files: Path) -> Any:
    tokens = dict(type="TokenFiles", paths=str(files / "*.bin"))
    lines = dict(type="JsonlFiles", paths=str(files / "*.jsonl"))
    packed = dict(type="PackedTokens", source=tokens, length=7, shuffle_documents=True, position_ids=True)
    return {
        "lines": {**lines, "transform": noisy},
        "local": {**lines, "local_shuffle": 3, "transform": noisy},
        "packed": {**packed, "transform": noisy},
        "mixture": dict(type="Mixture", sources=[{**packed, "transform": noisy}, {**lines, "transform": noisy}], weights=[0.3, 0.7], num_samples=23),
    }[kind]  # fmt: skip


def data(cfg: Any, shard: tuple[int, int], workers: int = 0, endless: bool = True, batch_size: int = 2) -> TrainData:
    loader = build_dataloader(
        dict(
            dataset=cfg,
            batch_size=batch_size,
            num_workers=workers,
            collate_fn=list,
            sampler=dict(type="InfiniteSampler" if endless else "DefaultSampler", shuffle=True),
        ),
        training=True,
        seed=5,
        shard=shard,
        where="train_dataloader",
        logger=logging.getLogger("flextrain"),
    )
    return TrainData(loader, 1, seed=5, shard=shard)


def read(
    cfg: Any, processes: int, start: int, updates: int | None, workers: int = 0, endless: bool = True, epoch: int = 0
) -> tuple[list[Any], int]:
    """The samples of the next updates over all processes, in the order of their positions, and the position after them."""
    parts, after = [], 0
    for index in range(processes):
        own = data(cfg, (index, processes), workers, endless)
        window = own.resume_at(epoch, start) if start else 0
        stop = None if updates is None else window + updates
        batches = islice(own.windows(epoch, window, stop), updates)
        parts.append([sample for (batch,) in batches for sample in batch])
        after = (own.position(epoch, stop) or 0) if stop is not None else 0
        own.close()
    return [row[number] for row in zip_evenly(parts) for number in range(len(row))], after


def zip_evenly(parts: list[list[Any]]) -> list[list[Any]]:
    return [[part[at] for part in parts if at < len(part)] for at in range(max(map(len, parts)))]


@pytest.mark.parametrize("kind", ["lines", "local", "packed", "mixture"])
def test_every_pair_of_numbers_of_processes(files: Path, kind: str) -> None:
    """What is read after a change is what one process would have read, augmentation included, over the ends of passes."""
    cfg = dataset(kind, files)
    whole, _ = read(cfg, 1, 0, 60)
    assert len({json.dumps(sample) for sample in whole}) == 120  # no two draws are alike
    for before, after in product(range(1, 5), repeat=2):
        first, position = read(cfg, before, 0, 3)
        second, end = read(cfg, after, position, 6)
        assert position == 6 * before
        assert end == position + 12 * after
        assert first + second == whole[:end], f"{before} processes, then {after}"


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["packed", "mixture"])
def test_workers_change_nothing(files: Path, kind: str) -> None:
    cfg = dataset(kind, files)
    whole, _ = read(cfg, 1, 0, 20)
    for before, after in ((1, 2), (2, 0), (0, 1)):
        first, position = read(cfg, 2, 0, 2, workers=before)
        second, end = read(cfg, 1, position, 3, workers=after)
        assert first + second == whole[:end]


@pytest.mark.parametrize("kind", ["lines", "local", "packed", "mixture"])
@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_passes(files: Path, kind: str, processes: int) -> None:
    """By epochs each sample of a pass comes once; the last batch is filled up with fewer than there are processes."""
    cfg = dataset(kind, files)
    size = {"lines": 19, "local": 19, "packed": 31, "mixture": 23}[kind]
    for epoch in range(2):
        whole, _ = read(cfg, 1, 0, None, endless=False, epoch=epoch)
        assert len(whole) == size
        found, _ = read(cfg, processes, 0, None, endless=False, epoch=epoch)
        assert [sample[:-2] for sample in found[:size]] == [sample[:-2] for sample in whole]
        assert found[:size] == whole
        assert [sample[:-2] for sample in found[size:]] == [sample[:-2] for sample in whole[: len(found) - size]]
        assert len(found) - size < processes
        if kind in ("lines", "local"):
            assert sorted(sample[0] for sample in whole) == list(range(19))


def test_passes_of_an_endless_stream(files: Path) -> None:
    """Nothing is repeated or lost where one pass ends and the next begins, in the middle of a batch of all processes."""
    found, _ = read(dataset("local", files), 4, 0, 10)  # 80 samples, 19 in a pass
    passes = [[sample[0] for sample in found[begin : begin + 19]] for begin in range(0, 76, 19)]
    assert all(sorted(each) == list(range(19)) for each in passes)
    assert len({tuple(each) for each in passes}) == 4


# A billion samples


class Huge:
    """A source of a billion samples that are computed, and counts how many are read."""

    fingerprint = "a billion"
    reads = 0

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> list[int]:
        Huge.reads += 1
        return [index, index + 1]

    def lengths(self) -> Any:
        return Twos()


class Twos:
    """The lengths of its samples: two each; counts how many are asked for."""

    asked = 0

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, span: slice) -> Any:
        start, stop, _ = span.indices(10**9)
        Twos.asked += stop - start
        return np.full(stop - start, 2)


def test_a_billion_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first batch after resuming needs a number of steps that does not depend on where it is."""
    from flextrain.runner.data.streams import packing

    ends = np.minimum(np.arange(1, -(-(10**9) // GROUP) + 1) * GROUP, 10**9) * 2
    monkeypatch.setattr(packing, "ends_of_groups", lambda lengths, extra=0: ends)
    packed = PackedTokens(Huge(), 8, index_dir=tmp_path, shuffle_documents=True)
    mixture = Mixture([packed, Huge()], [0.4, 0.6])
    assert Twos.asked == Huge.reads == 3  # for the fingerprint
    times: list[int] = []
    real = MixtureSchedule._times
    monkeypatch.setattr(
        MixtureSchedule,
        "_times",
        lambda self, source, first, count: times.append(count) or real(self, source, first, count),
    )
    position = 987_654_321 * 6
    for processes in (1, 3):
        Twos.asked = Huge.reads = 0
        times.clear()
        own = data(mixture, (0, processes), batch_size=4)
        window = own.resume_at(0, position)
        ((batch,),) = own.windows(0, window, window + 1)
        assert len(batch) == 4
        assert sum(times) < 20_000
        assert Huge.reads <= 4 * 5
        assert Twos.asked <= 4 * 2 * GROUP + 20


# Runs


def as_sample(value: Any) -> dict[str, Any]:
    number = int(value)
    generator = torch.Generator().manual_seed(number)
    return {"index": number, "x": torch.randn(6, generator=generator), "y": torch.tensor(number % 2)}


def stream(files: Path, **more: Any) -> dict[str, Any]:
    """Settings of a run that never ends an epoch."""
    source = dict(type="JsonlFiles", paths=str(files / "*.jsonl"), transform=as_sample)
    mixture = dict(type="Mixture", sources=[source, {**source, "local_shuffle": 2}], weights=[1, 2])
    given = setting(4, 2, sampler=dict(type="InfiniteSampler"))
    given["train_dataloader"] |= {"dataset": mixture, **more}
    return {**given, "train_cfg": dict(by_epoch=False, max_iters=14), "param_scheduler": None}


@pytest.mark.distributed
def test_runs(files: Path, tmp_path: Path, workers2: WorkerGroup, workers3: WorkerGroup) -> None:
    """A run that stops on two processes goes on with three, then with one, on the samples of a run that never stopped."""
    whole = on(None, tmp_path / "whole", {**stream(files), "train_cfg": dict(by_epoch=False, max_iters=40)})
    order = list(chain(*whole["trained"]))
    folder = tmp_path / "run"
    seen: list[int] = []
    for group, until in ((workers2, 3), (workers3, 7), (None, None)):
        strategy = {"strategy": DDP} if group else {}
        found = on(group, folder, stream(files), until, **strategy)
        seen += deal(found["parts"])
    assert seen == order[: len(seen)]
    assert len(seen) == 3 * 4 + 4 * 6 + 7 * 2


def deal(parts: list[Any]) -> list[int]:
    """The samples of all processes, as they were dealt."""
    return [part[at] for updates in zip(*parts, strict=True) for at in range(len(updates[0])) for part in updates]


def on_other_files(folder: str, files: str) -> Any:
    """A run whose processes have different files."""
    rank = int(os.environ["RANK"])
    given = setting(4, 2)
    given["train_dataloader"]["dataset"] = dict(
        type="JsonlFiles", paths=f"{files}/same{rank}.jsonl", transform=as_sample
    )
    with pytest.raises(ConfigError) as error:
        train(folder, {**given, "strategy": DDP})
    return str(error.value)


@pytest.mark.distributed
def test_other_files_on_another_process(files: Path, tmp_path: Path, workers2: WorkerGroup) -> None:
    for rank in range(2):
        (files / f"same{rank}.jsonl").write_text("1\n2\n")
    said = workers2.run(on_other_files, str(tmp_path / "run"), str(files))
    assert said[0] == said[1]
    assert said[0].startswith("train_dataloader.dataset: is JsonlFiles of 2 samples (")
    assert said[0].endswith(
        "on process 1, which read other files, chose other samples or have other settings; give all the same"
    )


def test_changed_files(files: Path, tmp_path: Path) -> None:
    """In the middle of a pass they are refused in a line; so are other weights of a mixture of the same length."""
    on(None, tmp_path / "run", stream(files), 3)
    with open(files / "3.jsonl", "r+") as changed:
        changed.write("9")  # of the same size
    with refuses(
        CheckpointError, matches=r"in the middle of an epoch of Mixture of 38 samples \(\w+\), and the data are Mixture"
    ):
        on(None, tmp_path / "run", stream(files))
    (files / "3.jsonl").write_text("".join(f"{value}\n" for value in range(6, 19)))
    other = stream(files)
    other["train_dataloader"]["dataset"]["weights"] = [1, 3]
    with pytest.raises(CheckpointError, match="files or settings of train_dataloader.dataset have changed"):
        on(None, tmp_path / "run", other)
    on(None, tmp_path / "run", stream(files))


def changed_orders(files: Path) -> dict[str, tuple[Any, Any]]:
    """Data before and after a change of their order alone."""
    first, second = (
        dict(type="JsonlFiles", paths=str(files / f"{number}.jsonl"), transform=as_sample) for number in (0, 3)
    )
    samples = [as_sample(value) for value in range(24)]
    return {
        "blocks": ({**second, "local_shuffle": 3}, second),
        "row groups": (table(files), table(files, local_shuffle=1)),
        "one after the other": tuple(
            dict(type="ConcatDataset", datasets=each) for each in ([first, second], [second, first])
        ),
        "repeated": tuple(dict(type="RepeatDataset", times=2, dataset=each) for each in (second, {**second, "local_shuffle": 3})),
        "subset": (Subset(samples, range(18)), Subset(samples, range(1, 19))),
        "rows": tuple(rows_of(samples).select(range(at, at + 18)).shuffle(seed=at) for at in (0, 1)),
        "same rows": (rows_of(samples), rows_of([*samples[:9], *samples[15:], *samples[9:15]])),
    }  # type: ignore[return-value]  # fmt: skip


def table(files: Path, **more: Any) -> dict[str, Any]:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"n": list(range(20))}), files / "rows.parquet", row_group_size=3)
    return dict(type="ParquetFiles", paths=str(files / "rows.parquet"), transform=of_row, **more)


def of_row(row: Any) -> dict[str, Any]:
    return as_sample(row["n"])


def rows_of(samples: list[Any]) -> Any:
    return pytest.importorskip("datasets").Dataset.from_list(samples).with_format("torch")


@pytest.mark.parametrize(
    "name", ["blocks", "row groups", "one after the other", "repeated", "subset", "rows", "same rows"]
)
def test_a_changed_order_is_refused_in_the_middle_of_a_pass(files: Path, tmp_path: Path, name: str) -> None:
    """Samples would be lost, and others come twice."""
    before, after = changed_orders(files)[name]

    def given(dataset: Any) -> dict[str, Any]:
        settings = setting(4, 1)
        settings["train_dataloader"]["dataset"] = dataset
        return settings

    on(None, tmp_path / "run", given(before), 2)
    with refuses(CheckpointError, matches=r"in the middle of an epoch of \w+ of \d+ samples \(\w+\), and the data are"):
        on(None, tmp_path / "run", given(after))
    on(None, tmp_path / "run", given(before))


def on_own_choice(folder: str, name: str, kind: str, more: int = 0) -> str:
    """A run whose processes have drawn other samples of the same data, as random_split does without a generator."""
    rank = int(os.environ["RANK"])
    own = Subset([as_sample(value) for value in range(24)], range(rank, 20 + rank * (1 + more)))  # type: ignore[arg-type]
    given = setting(4, 2) | validation()
    given |= {f"test_{key}": given[f"val_{key}"] for key in ("dataloader", "cfg", "evaluator")}
    given[name]["dataset"] = own
    if kind != "config":
        sampler: Any = (
            DistributedSampler(own, 2, rank) if kind == "DistributedSampler" else SubsetRandomSampler(range(20))
        )
        given[name] = dict(loader=DataLoader(own, batch_size=2, sampler=sampler), shard=True)
    runner = make_runner(folder, **{**given, "strategy": DDP})
    with pytest.raises(ConfigError) as error:
        _ = runner.test() if name == "test_dataloader" else runner.train()
    runner.strategy.leave()
    return str(error.value)


def on_own_files(folder: str, files: str, until: int | None) -> Any:
    """A run whose processes have files of their own, and say so."""
    given = setting(2, 2)
    source = dict(type="JsonlFiles", paths=f"{files}/own{os.environ['RANK']}.jsonl", transform=as_sample)
    given["train_dataloader"] |= dict(dataset=source, shard=False)
    return train(folder, {**given, "strategy": DDP}, until)["trained"]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "kind", "more"),
    [
        ("train_dataloader", "config", 0),
        ("train_dataloader", "DistributedSampler", 0),
        ("val_dataloader", "config", 0),
        ("val_dataloader", "DistributedSampler", 1),
        ("test_dataloader", "SubsetRandomSampler", 0),
    ],
)
def test_samples_that_each_process_chose(
    tmp_path: Path, workers2: WorkerGroup, name: str, kind: str, more: int
) -> None:
    """Other samples of one dataset are refused."""
    said = workers2.run(on_own_choice, str(tmp_path), name, kind, more)
    is_other = "has 20 to 21 samples depending on the process" if more else "is Subset of 20 samples ("
    assert said[0].startswith(f"{name}.dataset: {is_other}")
    assert said[0] == said[1]


@pytest.mark.distributed
def test_files_that_each_process_has(files: Path, tmp_path: Path, workers2: WorkerGroup) -> None:
    """Files of its own are not refused: neither at the beginning, nor after resuming."""
    for rank in range(2):
        lines = range(100 * rank, 100 * rank + 12)
        (files / f"own{rank}.jsonl").write_text("".join(f"{value}\n" for value in lines))
    whole = workers2.run(on_own_files, str(tmp_path / "whole"), str(files), None)
    first = workers2.run(on_own_files, str(tmp_path / "parts"), str(files), 2)
    rest = workers2.run(on_own_files, str(tmp_path / "parts"), str(files), None)
    assert [one + other for one, other in zip(first, rest, strict=True)] == whole


# Samplers


def test_samplers_of_others_are_refused_for_mixtures() -> None:
    mixture = Mixture([[1], [2]])
    for sampler in (RandomSampler(mixture), DistributedSampler(mixture, 1, 0)):
        with pytest.raises(
            ConfigError, match=rf"train_dataloader.sampler: {type(sampler).__name__} has an order of its own"
        ):
            build_dataloader(
                dict(dataset=mixture, sampler=sampler),
                training=True,
                seed=0,
                shard=(0, 1),
                where="train_dataloader",
                logger=logging.getLogger("flextrain"),
            )


# Streams with a state of their own


class Counter(IterableDataset[Any]):
    """A stream with a state, as those of Hugging Face's datasets have it; counts its readings."""

    def __init__(self, stateful: bool = True) -> None:
        self.at, self.begin, self.reads = 0, 0, 0
        if stateful:
            self.state_dict = lambda: {"at": self.at}
            self.load_state_dict = lambda state: setattr(self, "begin", state["at"])

    def __iter__(self) -> Any:
        begin, self.begin = self.begin, 0
        for number in range(begin, 30):
            self.at = number + 1
            self.reads += 1
            yield as_sample(number)


@pytest.mark.parametrize("stateful", [True, False])
def test_streams_with_and_without_a_state(tmp_path: Path, stateful: bool) -> None:
    """One with a state goes on from it; another is read again, and the log says how long that took."""
    given = stream(tmp_path)

    def settings(source: Any) -> dict[str, Any]:  # fmt: skip
        loader = dict(dataset=source, batch_size=2, collate_fn="default_collate")
        return {**given, "train_dataloader": loader}

    on(None, tmp_path / "run", settings(Counter(stateful)), 4)
    source = Counter(stateful)
    found = on(None, tmp_path / "run", settings(source))
    assert list(chain(*found["trained"])) == list(range(8, 28))
    assert source.reads == (20 if stateful else 28)
    said = "\n".join(found["said"])
    if stateful:
        assert "of Counter continues from its state_dict in the checkpoint, on the same number of processes" in said
    else:
        assert "reads 4 batches of Counter again" in said
        assert "read 4 batches of Counter again in 0." in said


class Seven(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return map(as_sample, range(7))


@pytest.mark.parametrize("drop_last", [False, True])
def test_the_last_batch_of_a_pass_is_dropped_only_if_asked(tmp_path: Path, drop_last: bool) -> None:
    loader = dict(dataset=Seven(), batch_size=2, collate_fn="default_collate", drop_last=drop_last)
    found = on(None, tmp_path / "run", {**stream(tmp_path), "train_dataloader": loader})
    whole = [[0, 1], [2, 3], [4, 5], *([] if drop_last else [[6]])]
    assert found["trained"][:8] == (whole * 3)[:8]


def test_an_error_of_its_load_state_dict_is_no_damage(tmp_path: Path) -> None:
    source = Counter()
    source.state_dict = lambda: None
    settings = {
        **stream(tmp_path),
        "train_dataloader": dict(dataset=source, batch_size=2, collate_fn="default_collate"),
    }
    on(None, tmp_path / "run", settings, 4)
    with pytest.raises(
        CheckpointError,
        match=r"iter_4: data could not be restored, .*test_streams_resume.py:\d+ raised TypeError: 'NoneT",
    ):
        on(None, tmp_path / "run", settings)


def test_without_torchdata_a_state_in_workers_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "torchdata.stateful_dataloader", None)
    logger = logging.getLogger("flextrain.test_of_streams")
    options = dict(batch_size=2, num_workers=1, collate_fn=default_collate)
    loader = loader_of_stream(Counter(), options, True, "train_dataloader", logger)
    assert (type(loader), loader.num_workers, loader.batch_size) == (DataLoader, 1, 2)
    assert (
        "a resumed run reads it again from the beginning; pip install torchdata, or give num_workers=0" in caplog.text
    )


class Told(Counter):
    """One that is told the epoch."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


@pytest.mark.parametrize("source, until, warns", [(Counter, 17, True), (Counter, 15, False), (Counter, 4, False), (Told, 17, False)])  # fmt: skip
def test_passes_that_a_stream_may_count_itself(tmp_path: Path, source: Any, until: int, warns: bool) -> None:
    """A pass has 15 updates; resumed after the first one, a stream without set_epoch begins with its first order."""

    def settings() -> dict[str, Any]:
        loader = dict(dataset=source(False), batch_size=2, collate_fn="default_collate")
        return {**stream(tmp_path), "train_dataloader": loader, "train_cfg": dict(by_epoch=False, max_iters=20)}

    on(None, tmp_path / "run", settings(), until)
    said = "\n".join(on(None, tmp_path / "run", settings())["said"])
    assert ("Counter has no set_epoch, so it does not know that 1 pass came before" in said) == warns


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_streams_of_hugging_face(tmp_path: Path, workers: int) -> None:
    datasets = pytest.importorskip("datasets")
    pytest.importorskip("torchdata")
    from flextrain.runner.data.streams.hugging_face import begins_anew

    def settings(workers: int = workers) -> dict[str, Any]:
        numbers = datasets.Dataset.from_dict({"number": list(range(40))}).to_iterable_dataset(num_shards=2)
        source = numbers.map(lambda row: as_sample(row["number"]), remove_columns=["number"]).with_format("torch")
        loader = dict(dataset=source, batch_size=2, collate_fn="default_collate", num_workers=workers)
        # Twenty updates are a pass.
        return {**stream(tmp_path), "train_dataloader": loader, "train_cfg": dict(by_epoch=False, max_iters=26)}

    whole = on(None, tmp_path / "whole", settings())
    on(None, tmp_path / "run", settings(), 22)
    found = on(None, tmp_path / "run", settings())
    assert found["trained"] == whole["trained"][22:]
    assert any("again" in line for line in found["said"]) is not begins_anew()
    on(None, tmp_path / "other", settings(), 4)
    with pytest.raises(CheckpointError, match="was saved in the middle of an epoch with (workers|sampler)=.*, it is"):
        on(None, tmp_path / "other", settings(1))
