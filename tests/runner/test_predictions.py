"""runner.predict: one prediction for every sample, in order, under every strategy and on any number of processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from flextrain import ConfigError, FlexibleRunner
from flextrain.testing import WorkerGroup

from .training import refuses

SAMPLES = 11


class Net(nn.Module):
    def __init__(self, gives: str = "dict") -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)
        self.gives = gives

    def forward(self, index: Tensor, x: Tensor) -> Any:
        logits = self.layer(x)
        return {
            "tensor": logits,
            "tuple": (index, (logits, index)),
            "states": (logits, logits.T),  # as a recurrent layer returns its state by layers
            "list": [int(each) for each in index],
            "dict": {
                "loss": logits.mean(),
                "index": index,
                "hidden": (logits, {"index": index}),
                "names": ["n"] * len(x),
                "cache": None,
            },
            "mean": logits.mean(0),
            "number": logits.mean(),
        }[self.gives]


def data(size: int = SAMPLES) -> dict[str, Any]:
    samples = [{"index": i, "x": torch.tensor([float(i), 1.0])} for i in range(size)]
    return dict(dataset=samples, batch_size=2, collate_fn=dict(type="default_collate"))


def predict(
    work_dir: str, gives: str = "dict", loader: Any = None, train: bool = False, size: int = SAMPLES, **options: Any
) -> Any:
    given = {name: options.pop(name) for name in ("strategy", "load_from") if name in options}
    if train:
        given |= dict(
            train_dataloader=data(12),
            optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
            train_cfg=dict(max_epochs=1),
        )
    with FlexibleRunner(
        model=dict(type=Net, gives=gives), work_dir=work_dir, randomness=dict(seed=3), **given
    ) as runner:
        if train:
            runner.train()
        found = runner.predict(loader or data(size), **options)
        again = runner.predict(loader or data(size))
        assert found is None or len(found) == len(again)
        return found, {
            key: value.clone()
            for key, value in runner.strategy.module.state_dict().items()
            if isinstance(value, Tensor)
        }


def expected(state: dict[str, Tensor], size: int = SAMPLES) -> Tensor:
    x = torch.stack([torch.tensor([float(i), 1.0]) for i in range(size)])
    return x @ state["layer.weight"].T + state["layer.bias"]


@pytest.mark.parametrize("loader", ["dict", "DataLoader", "list"])
def test_one_process(tmp_path: Path, loader: str) -> None:
    given: Any = data()
    given["collate_fn"] = torch.utils.data.default_collate
    given = {"dict": given, "DataLoader": DataLoader(**given), "list": [*DataLoader(**given)]}[loader]
    found, state = predict(str(tmp_path), loader=given)
    assert [int(each["index"]) for each in found] == list(range(SAMPLES))
    for each, row in zip(found, expected(state), strict=True):
        assert each.keys() == {"index", "hidden", "names"}
        torch.testing.assert_close(each["hidden"][0], row)
        assert each["hidden"][1] == {"index": each["index"]}
        assert each["names"] == "n"
    (log,) = tmp_path.glob("*/*.log")
    assert (
        log.read_text().count("predict: loss, cache have no entry for each sample, and are left out") == 2
    )  # once in a call


def test_what_a_model_may_return(tmp_path: Path) -> None:
    found, state = predict(str(tmp_path / "tensor"), "dict", train=True)
    torch.testing.assert_close(torch.stack([each["hidden"][0] for each in found]), expected(state))
    found, _ = predict(str(tmp_path / "tuple"), "tuple")
    assert [(int(index), int(pair[1])) for index, pair in found] == [(i, i) for i in range(SAMPLES)]
    found, _ = predict(str(tmp_path / "list"), "list")
    assert found == list(range(SAMPLES))


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(gives="mean"), "predict: the model returned 18 predictions for 11 samples"),
        (
            dict(gives="number"),
            "predict: the model returned Tensor, return a tensor or list with an entry for each sample",
        ),
        (
            dict(gives="states"),
            "predict: the model returned a tuple, of which a part has no entry for each of the 2 samples; return a dict",
        ),
        (
            dict(loader={**data(), "shuffle": True}),
            "predict.dataloader.shuffle: predictions would come in another order",
        ),
        (
            dict(loader=DataLoader([1, 2], shuffle=True)),
            "predict.dataloader.sampler: predictions would come in another order",
        ),
        (
            dict(loader={**data(), "bach_size": 2}),
            'predict.dataloader.bach_size: unknown key, did you mean "batch_size"',
        ),
        (dict(full_weigths=True), 'predict.full_weigths: unknown key, did you mean "full_weights"'),
    ],
)
def test_what_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with refuses(ConfigError, message):
        predict(str(tmp_path), **options)


def of_batches(work_dir: str) -> Any:
    return predict(work_dir, "list", [*DataLoader(data()["dataset"], batch_size=2)])[0]


@pytest.mark.distributed
def test_a_list_of_batches_on_two_processes(tmp_path: Path, workers2: WorkerGroup) -> None:
    assert workers2.run(of_batches, str(tmp_path)) == [[*range(SAMPLES)]] * 2


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(data()["dataset"])


class OwnLoader(DataLoader[Any]):
    def __iter__(self) -> Any:
        return super().__iter__()


class Backwards(BatchSampler):
    def __iter__(self) -> Iterator[list[int]]:
        return (batch[::-1] for batch in super().__iter__())


def given(kind: str) -> Any:
    samples, pairs = data()["dataset"], [[i, i + 1] for i in range(0, SAMPLES - 1, 2)] + [[SAMPLES - 1]]
    batches = {"batch lists": pairs, "mirrored": Backwards(SequentialSampler(samples), 2, False)}
    samplers = {
        "replacing": RandomSampler(samples, replacement=True),
        "weighted": WeightedRandomSampler([1.0] * SAMPLES, SAMPLES),
        "subset": SubsetRandomSampler(range(SAMPLES)),
        "list": list(range(SAMPLES)),
    }
    collate: Any = torch.utils.data.default_collate
    if kind in ("stream", "workers", "own data"):
        own = dict(num_workers=2) if kind == "workers" else {}
        return dict(dataset=Stream(), batch_size=2, collate_fn="default_collate", shard=kind != "own data", **own)
    if kind == "own loader":
        return OwnLoader(samples, batch_size=2, collate_fn=collate)
    if kind in batches:
        return dict(dataset=samples, batch_sampler=batches[kind], collate_fn="default_collate", shard=True)
    if kind == "subset":  # in a DataLoader, of batches
        sampler = BatchSampler(samplers[kind], 2, False)
        return DataLoader(samples, batch_sampler=sampler, collate_fn=collate)
    return {**data(), "sampler": samplers[kind], "shard": True}


ORDERS = {
    "batch lists": "",
    "list": "",
    "stream": "",
    "own loader": "",
    "workers": "num_workers: predictions would come in another order than the data set's, 2 workers read a stream in turns",
    "own data": "shard: predictions would come in another order than the data set's, False gives every process data of its",
    "mirrored": "batch_sampler: predictions would come in another order than the data set's, Backwards",
    "replacing": "sampler: predictions would come in another order than the data set's, RandomSampler",
    "weighted": "sampler: predictions would come in another order than the data set's, WeightedRandomSampler",
    "subset": "sampler: predictions would come in another order than the data set's, SubsetRandomSampler",
}


def orders(work_dir: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with FlexibleRunner(model=dict(type=Net, gives="list"), work_dir=work_dir) as runner:
        for kind in ORDERS:
            try:
                found[kind] = runner.predict(given(kind))
            except ConfigError as error:
                found[kind] = str(error)
    return found


@pytest.mark.distributed
def test_predictions_of_two_processes_are_in_order_or_refused(tmp_path: Path, workers2: WorkerGroup) -> None:
    for found in workers2.run(orders, str(tmp_path)):
        for kind, refusal in ORDERS.items():
            if refusal:
                assert refusal in found[kind], kind
            else:
                assert found[kind] == [*range(SAMPLES)], kind


@pytest.mark.distributed
@pytest.mark.parametrize(
    "strategy, processes",
    [
        ("ddp", 3),
        pytest.param("fsdp", 2, marks=pytest.mark.full),
        pytest.param("zero3", 2, marks=pytest.mark.full),
        (dict(type="mesh", dp_shard=2, tp=2, plan={"layer": "colwise"}), 4),
    ],
)
@pytest.mark.parametrize("size", [SAMPLES, pytest.param(1, marks=pytest.mark.full)])
def test_several_processes(tmp_path: Path, workers: Any, strategy: Any, processes: int, size: int) -> None:
    alone, _ = predict(str(tmp_path / "one"), "tensor", size=size)
    group: WorkerGroup = workers(processes)
    for found, _ in group.run(predict, str(tmp_path / "all"), "tensor", strategy=strategy, size=size):
        torch.testing.assert_close(torch.stack(found), torch.stack(alone))
    on_0, *others = group.run(predict, str(tmp_path / "main"), "tensor", strategy=strategy, everywhere=False, size=size)
    torch.testing.assert_close(torch.stack(on_0[0]), torch.stack(alone))
    assert [found for found, _ in others] == [None] * len(others)
