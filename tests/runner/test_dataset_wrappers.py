"""Datasets inside datasets, by name: their samples, their random numbers, resuming; and worker_init_fn by name."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import ChainDataset, Dataset, IterableDataset, StackDataset, Subset, get_worker_info
from torch.utils.data import ConcatDataset as TorchConcatDataset

from flextrain import DATASETS, FUNCTIONS, ConfigError
from flextrain.runner.data.checks import check_dataloader
from flextrain.runner.data.dataloaders import TrainData
from flextrain.runner.data.dataset_wrappers import ClassBalancedDataset, ConcatDataset, RepeatDataset
from flextrain.runner.data.streams.mixture import Mixture
from flextrain.testing import WorkerGroup

from .test_sample_seeds import Noisy, data, over_processes, rows, stir
from .training import Net, SaveEvery, Watch, built_loader, differences, make_runner, whole_state

pytestmark = pytest.mark.usefixtures("quick")

Cfg = dict[str, Any]


@DATASETS.register_module(force=True)
class Letters(Dataset[str]):
    """One of MMEngine's kind: it loads late, and knows categories."""

    def __init__(self, letters: str = "abc", classes: Any = ("x", "y")) -> None:
        self.letters, self.metainfo, self.loaded, self.epoch = letters, {"classes": classes}, 0, -1

    def full_init(self) -> None:
        self.loaded += 1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.letters)

    def __getitem__(self, index: int) -> str:
        assert self.loaded == 1
        return self.letters[index]

    def get_data_info(self, index: int) -> Cfg:
        return {"letter": self.letters[index]}

    def get_cat_ids(self, index: int) -> list[str]:
        return [self.letters[index]]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter((1, 2))


ABC: Cfg = dict(type="Letters")
DE: Cfg = dict(type=Letters, letters="de")


def built(dataset: Any, **more: Any) -> Any:
    cfg = dict(dataset=dataset, **more)
    check_dataloader(cfg, "train_dataloader")
    return built_loader(cfg, (1, 2)).dataset


@pytest.mark.parametrize(
    "cfg, expected",
    [
        (dict(type="RepeatDataset", dataset=ABC, times=2), "abcabc"),
        (dict(type="ConcatDataset", datasets=[ABC, DE, Letters("f")]), "abcdef"),
        (dict(type=TorchConcatDataset, datasets=[ABC, DE]), "abcde"),
        (dict(type="torch.utils.data:ConcatDataset", datasets=[ABC, DE]), "abcde"),
        (dict(type="ClassBalancedDataset", dataset=dict(type=Letters, letters="aaab"), oversample_thr=1.0), "aaaaaabb"),
        (
            dict(type="RepeatDataset", times=2, dataset=dict(type="ConcatDataset", datasets=[DE, Letters("f")])),
            "defdef",
        ),
        (dict(type="ConcatDataset", datasets=[dict(type=RepeatDataset, dataset=DE, times=2), ABC]), "dedeabc"),
    ],
    ids=["repeated", "joined", "torch", "torch-name", "balanced", "repeat-of-joined", "joined-repeat"],
)
def test_datasets_inside_datasets(cfg: Cfg, expected: str) -> None:
    dataset = built(cfg)
    assert len(dataset) == len(expected)
    assert "".join(dataset[i] for i in range(len(expected))) == expected
    assert "".join(dataset[i - len(expected)] for i in range(len(expected))) == expected
    assert [dataset.get_data_info(i)["letter"] for i in range(len(expected))] == list(expected)
    assert [dataset.get_cat_ids(i) for i in range(len(expected))] == [[letter] for letter in expected]
    assert dataset.metainfo == {"classes": ("x", "y")}
    with pytest.raises(IndexError):
        dataset[len(expected)]


def test_what_datasets_load_late() -> None:
    inner = Letters("ab"), Letters("c")
    late = RepeatDataset(ConcatDataset(list(inner), lazy_init=True), 2, lazy_init=True)
    assert [part.loaded for part in inner] == [0, 0]
    assert (late[0], late[5], len(late)) == ("a", "c", 6)
    late.set_epoch(3)
    assert [(part.loaded, part.epoch) for part in inner] == [(1, 3), (1, 3)]
    assert built(RepeatDataset(Letters(), 2, lazy_init=True)).dataset.loaded == 1


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.processes)])
def test_datasets_inside_those_of_torch_are_told_the_epoch(workers: int) -> None:
    """Also in workers that are kept over epochs."""

    class Epochs(Letters):
        def __getitem__(self, index: int) -> int:  # type: ignore[override]
            return self.epoch

    around = StackDataset(a=TorchConcatDataset([Subset(Epochs(), [0, 1]), Subset(Epochs(), [2])]), b=Epochs())
    kept = dict(num_workers=1, persistent_workers=True) if workers else {}
    read = TrainData(built_loader(dict(dataset=around, batch_size=3, collate_fn=list, **kept), (0, 1)), 1, 0)
    found = [[*sample.values()] for epoch in range(3) for window in read.windows(epoch) for sample in window[0]]
    read.close()
    assert found == [[epoch, epoch] for epoch in range(3) for _ in range(3)]


class EpochStream(IterableDataset[int]):
    """Gives the number of the epoch that it was told."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield self.epoch


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.processes)])
def test_streams_inside_those_of_torch_are_told_the_epoch(workers: int) -> None:
    kept = dict(num_workers=1, persistent_workers=True) if workers else {}
    chained = ChainDataset([EpochStream(), ChainDataset([EpochStream()])])
    read = TrainData(built_loader(dict(dataset=chained, batch_size=2, collate_fn=list, **kept), (0, 1)), 1, 0)
    found = [list(window[0]) for epoch in range(3) for window in read.windows(epoch)]
    read.close()
    assert found == [[epoch] * 2 for epoch in range(3)]


def test_a_mixture_of_several_passes_inside_datasets_of_torch() -> None:
    mixture = Mixture([Letters("abcd"), Letters("e")], weights=[1, 1])
    for around in (Subset(mixture, [0, 1, 2]), TorchConcatDataset([Letters(), StackDataset(mixture)])):
        with pytest.raises(
            ConfigError, match=r"dataset \(.*\): a Mixture with weights or num_samples goes on in every pass"
        ):
            built_loader(dict(dataset=around, batch_size=1, collate_fn=list), (0, 1))
    built_loader(dict(dataset=Subset(Mixture([Letters(), Letters()]), [0, 1]), batch_size=1, collate_fn=list), (0, 1))


def test_rare_categories_are_repeated() -> None:
    """Of four samples, "a" is in all, "b" in one: sqrt(0.5 / 0.25) = 1.41, rounded up."""

    class Several(Letters):
        def get_cat_ids(self, index: int) -> list[str]:
            return [["a"], ["a", "b"], ["a"], ["a", "a"]][index]

    assert ClassBalancedDataset(Several("klmn"), 0.5).repeat_indices == [0, 1, 1, 2, 3]
    assert ClassBalancedDataset(Several("klmn"), 0.25).repeat_indices == [0, 1, 2, 3]


NESTED = dict(type="ConcatDataset", datasets=[ABC, dict(type="RepeatDataset", times=2, dataset=dict(type="Letterz"))])


@pytest.mark.parametrize(
    "cfg, says",
    [
        (NESTED, r'dataset.datasets\[1\].dataset.type: "Letterz" is no known dataset, did you mean "Letters"'),
        (dict(type="RepeatDataset", dataset=dict(type=Letters, leters="a"), times=2), r"dataset.dataset.leters: unknown"),
        (dict(type="RepeatDataset", dataset=ABC), r"dataset.times: missing"),
        (dict(type="RepeatDataset", dataset=ABC, times=0), r"dataset.times: 0 is not allowed, give 1 or more"),
        (dict(type="RepeatDataset", dataset=dict(type=Net), times=2), r"dataset.dataset.type: Net is no dataset"),
        (dict(type="RepeatDatset", dataset=ABC, times=1), r'dataset.type: "RepeatDatset" is no known dataset, did you mean "RepeatDataset"'),
        (dict(type=TorchConcatDataset, datasets=[ABC], tims=1), r"dataset.tims: unknown key"),
    ],
    ids=["nested-type", "nested-key", "missing", "zero", "no-dataset", "misspelled", "torch"],
)  # fmt: skip
def test_a_wrong_dataset_is_told_before_anything_is_built(cfg: Cfg, says: str) -> None:
    with pytest.raises(ConfigError, match=f"^train_dataloader.{says}"):
        check_dataloader(dict(dataset=cfg), "train_dataloader")


@pytest.mark.parametrize(
    "cfg, says",
    [
        (dict(type="ConcatDataset", datasets=[]), r"datasets: \[\] is not allowed, give a list of at least one dataset"),
        (dict(type="ConcatDataset", datasets=ABC), r"datasets: .* is not allowed, give a list or a tuple"),
        (dict(type="RepeatDataset", dataset=Stream(), times=2), r"dataset: Stream is not allowed, give a dataset with __g"),
        (dict(type="ConcatDataset", datasets=[ABC, Stream()]), r"datasets\[1\]: Stream is not allowed"),
        (dict(type="ClassBalancedDataset", dataset=[1, 2], oversample_thr=0.5), r"dataset: list has no get_cat_ids"),
        (dict(type="ClassBalancedDataset", dataset=ABC, oversample_thr=0.0), r"oversample_thr: 0.0 is not allowed"),
        (
            dict(type="ConcatDataset", datasets=[ABC, dict(type=Letters, classes=("z",))]),
            r"datasets\[1\]: its metainfo\['classes'\] differs from that of datasets\[0\]",
        ),
    ],
    ids=["empty", "a-dict", "stream", "streams", "no-categories", "threshold", "metainfo"],
)  # fmt: skip
def test_datasets_that_do_not_fit(cfg: Cfg, says: str) -> None:
    with pytest.raises(ConfigError, match=f"^train_dataloader.dataset.{says}"):
        built(cfg)


def test_metainfo_that_may_differ() -> None:
    parts = [ABC, dict(type=Letters, classes=("z",))]
    assert built(dict(type="ConcatDataset", datasets=parts, ignore_keys="classes")).metainfo["classes"] == ("x", "y")
    arrays = [Letters("a", torch.arange(2)), Letters("b", torch.arange(2))]
    assert len(ConcatDataset(arrays)) == 2


# Random numbers and resuming


def twice() -> Cfg:
    return dict(type="ConcatDataset", datasets=[dict(type=RepeatDataset, dataset=Noisy(5), times=2), Noisy(3)])


@pytest.mark.parametrize("workers", [0, 1])
def test_repeated_samples_draw_numbers_of_their_own(workers: int) -> None:
    whole = over_processes(1, 1, make=twice)
    assert sorted(row[0] for row in whole) == sorted([*range(5), *range(5), *range(3)])
    numbers = [number for row in whole for number in row[1:]]
    assert len(set(numbers)) == len(numbers)
    stir()
    assert over_processes(2, 1, make=twice, num_workers=workers)[: len(whole)] == whole
    assert rows(data(twice(), num_workers=workers), 1, 3) == whole[6:]


class Pairs(Dataset[Cfg]):
    """Samples for ``Net``, with noise."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Cfg:
        return {"index": index, "x": torch.randn(6), "y": torch.tensor(index % 2)}


def run(folder: Path | str, **changes: Any) -> Any:
    pairs = dict(type=Pairs, length=5)
    dataset = dict(type="ConcatDataset", datasets=[pairs, dict(type="RepeatDataset", dataset=pairs, times=3)])
    watch = Watch()
    loader = dict(batch_size=2, dataset=dataset, collate_fn="default_collate")
    hooks = [watch, *changes.pop("custom_hooks", ())]
    runner = make_runner(folder, train_dataloader=loader, train_cfg=dict(max_epochs=2), custom_hooks=hooks, **changes)
    runner.train()
    state = whole_state(runner)
    runner.strategy.leave()
    return watch.trained, state


def test_resuming_inside_an_epoch_of_nested_datasets(tmp_path: Path) -> None:
    trained, state = run(tmp_path / "a", custom_hooks=[SaveEvery({4})])
    again, resumed = run(tmp_path / "b", resume=str(tmp_path / "a" / "iter_4"))
    assert again == trained[4:]
    assert not differences(resumed, state)
    assert sorted(chain.from_iterable(trained[:10])) == sorted([*range(5)] * 4)


def on_processes(folder: str) -> list[list[int]]:
    trained: list[list[int]] = run(folder)[0]
    return trained


@pytest.mark.distributed
def test_nested_datasets_on_two_processes(tmp_path: Path, workers2: WorkerGroup) -> None:
    first, second = workers2.run(on_processes, str(tmp_path))
    assert len(first) == len(second) == 10
    assert sorted(chain.from_iterable(first[:5] + second[:5])) == sorted([*range(5)] * 4)


# worker_init_fn


@FUNCTIONS.register_module(force=True)
def remember(worker_id: int, num_workers: int, seed: int, rank: int, name: str = "?") -> None:
    info: Any = get_worker_info()
    info.dataset.told = (worker_id, num_workers, rank, seed, name)


def little(worker_id: int, num_workers: int = 9) -> None:
    info: Any = get_worker_info()
    info.dataset.told = (worker_id, num_workers)


class Told(Dataset[Any]):
    told: Any = None

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return self.told


def told(init: Any, workers: int = 2) -> list[Any]:
    cfg = dict(dataset=Told(), num_workers=workers, worker_init_fn=init, collate_fn=list, batch_size=1)
    check_dataloader(cfg, "train_dataloader")
    return list(chain.from_iterable(chain.from_iterable(data(None, loader=cfg, shard=(1, 2)).windows(0))))


@pytest.mark.processes
def test_worker_init_fn_by_name() -> None:
    assert told(dict(type="remember", name="n")) == [(0, 2, 1, 5, "n"), (1, 2, 1, 5, "n")]
    assert told(dict(type=remember, seed=8, rank=3), workers=1) == [(0, 1, 3, 8, "?")] * 2
    assert told(f"{__name__}:little", workers=1) == [(0, 1)] * 2


@pytest.mark.parametrize(
    "init, says",
    [
        (dict(type="rember"), r'worker_init_fn.type: "rember" is no known function, did you mean "remember"'),
        (dict(name="x"), r"worker_init_fn.type: missing, say which function"),
        (dict(type="remember", nam="x"), r'worker_init_fn.nam: unknown key, did you mean "name"'),
        (dict(type="remember", worker_id=1), r"worker_init_fn.worker_id: is filled in by flextrain, leave it out"),
        (dict(type="remember", name=1), r"worker_init_fn.name: 1 is not allowed, give a string"),
        (3, r"worker_init_fn: 3 is not allowed, give a function, its name, or dict\(type=...\)"),
    ],
)
def test_a_wrong_worker_init_fn(init: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=f"^train_dataloader.{says}"):
        check_dataloader(dict(dataset=[1], num_workers=1, worker_init_fn=init), "train_dataloader")


def test_a_dataset_without_categories_raises_every_time() -> None:
    dataset = ClassBalancedDataset([1, 2, 3], 0.5, lazy_init=True)
    for _ in range(2):
        with pytest.raises(ConfigError, match="list has no get_cat_ids"):
            len(dataset)


def test_categories_that_cannot_be_read_raise_every_time() -> None:
    class Broken(Letters):
        def get_cat_ids(self, index: int) -> list[str]:
            raise OSError("annotations")

    dataset = ClassBalancedDataset(Broken(), 0.5, lazy_init=True)
    for _ in range(2):
        with pytest.raises(OSError, match="annotations"):
            len(dataset)
