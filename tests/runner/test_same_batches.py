"""Processes that hold one model together train on the same batches: data that divide themselves otherwise are refused."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from flextrain import ConfigError, FlexibleRunner, Hook
from flextrain.core.base.tensors import of_leaves
from flextrain.data import data_shard
from flextrain.testing import WorkerError, WorkerGroup

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("quick")]
GROUPS: dict[str, dict[str, Any]] = {
    "pp": dict(type="MeshStrategy", pp=2),
    "tp": dict(type="MeshStrategy", tp=2, plan={"layers.0": "colwise", "layers.1": "rowwise"}),
    "ddp": dict(type="DDPStrategy"),
}


class Numbers(IterableDataset[Any]):
    """Samples whose sum a model knows, and their numbers."""

    def samples(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(0)
        for number in range(64):
            x = torch.rand(4, generator=generator)
            yield {"x": x, "y": x.sum(0, keepdim=True), "number": torch.tensor(number)}

    def __iter__(self) -> Iterator[Any]:
        index, count = data_shard()
        return islice(self.samples(), index, None, count)


class ByRank(Numbers):
    """Divided as is right where every process trains on data of its own; alike at first, if so told."""

    def __init__(self, alike: int = 0) -> None:
        self.alike = alike

    def __iter__(self) -> Iterator[Any]:
        samples = self.samples()
        yield from islice(samples, self.alike)
        yield from islice(samples, dist.get_rank(), None, dist.get_world_size())


class Sum(nn.Module):
    """Knows the sum: its loss is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 1, bias=False))
        nn.init.eye_(self.layers[0].weight)  # type: ignore[arg-type]
        nn.init.ones_(self.layers[1].weight)  # type: ignore[arg-type]

    def forward(self, x: Tensor, y: Tensor, number: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.layers(x) - y).square().mean()}


class Seen(Hook):
    """The numbers of the samples of every update."""

    def __init__(self) -> None:
        self.numbers: list[list[int]] = []

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        self.numbers.append(data_batch["number"].tolist())


def numbers(folder: str, group: str, dataset: Any, iters: int = 6, **loader: Any) -> list[list[int]]:
    """Train, and return the numbers of the samples of each update of this process."""
    seen = Seen()
    FlexibleRunner(
        model=Sum,
        work_dir=folder,
        strategy=GROUPS[group],
        train_dataloader=dict(dataset=dataset, batch_size=4, collate_fn="default_collate") | {"shard": False} | loader,
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.0)),
        train_cfg=dict(by_epoch=False, max_iters=iters),
        custom_hooks=[seen],
        log_level="WARNING",
    ).train()
    return seen.numbers


@pytest.mark.parametrize("group", ["pp", "tp"])
@pytest.mark.parametrize("alike", [0, 8, pytest.param(20, id="all but the last")])
def test_a_group_with_different_batches_is_refused(
    tmp_path: Path, workers2: WorkerGroup, group: str, alike: int
) -> None:
    message = (
        "train_dataloader.dataset: gives process 1 another batch than process 0, and both train shard 0 of the data, "
        r"because they hold one model together; divide it by flextrain.data.data_shard\(\)"
    )
    with pytest.raises(WorkerError, match=message):
        workers2.run(numbers, str(tmp_path), group, ByRank(alike))


@pytest.mark.parametrize("group", ["pp", "ddp"])
@pytest.mark.parametrize("loading", [0, 1, pytest.param(2, marks=pytest.mark.full)])
def test_a_stream_divides_itself_by_its_shard(tmp_path: Path, workers2: WorkerGroup, group: str, loading: int) -> None:
    context = dict(multiprocessing_context="forkserver") if loading == 1 else {}
    one, two = workers2.run(numbers, str(tmp_path), group, Numbers(), num_workers=loading, **context)
    assert (one == two) == (group == "pp")
    own = sorted(chain(*one, *(() if group == "pp" else two)))
    assert own == list(range(24 if group == "pp" else 48))


class Late(Numbers):
    """Asks when the first sample is wanted."""

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()


@pytest.mark.parametrize("loading", [0, 1, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", [Numbers, Late])
def test_a_stream_that_divides_itself_is_not_divided_twice(
    tmp_path: Path, workers2: WorkerGroup, kind: Any, loading: int
) -> None:
    context = dict(multiprocessing_context="forkserver") if loading == 1 else {}
    one, two = workers2.run(numbers, str(tmp_path), "ddp", kind(), shard=True, num_workers=loading, **context)
    assert sorted(chain(*one, *two)) == list(range(48))


class Whole(Numbers):
    """Does not divide itself."""

    def __iter__(self) -> Iterator[Any]:
        return self.samples()


@pytest.mark.parametrize("kind, times", [(Whole, 1), (Numbers, 0)])
def test_processes_that_begin_with_the_same_samples_are_told(
    tmp_path: Path, workers2: WorkerGroup, kind: Any, times: int
) -> None:
    """``shard=False`` was the user's word; once, though there are two passes."""
    workers2.run(numbers, str(tmp_path), "ddp", kind(), 12)
    said = "".join(path.read_text() for path in tmp_path.rglob("*.log"))
    assert said.count("some begin with the same batch, so samples count several times") == times


def before_a_run() -> str:
    with pytest.raises(ConfigError, match="data_shard: a run has not said yet what this process trains on") as error:
        data_shard()
    return str(error.value)


def test_nothing_is_said_before_a_run(workers2: WorkerGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    assert data_shard() == (0, 1)
    workers2.run(before_a_run)
    monkeypatch.setenv("WORLD_SIZE", "2")
    before_a_run()


def test_leaves_tell_values_apart() -> None:
    class Sample:
        def __init__(self, value: Any) -> None:
            self.value = value

    values = [
        torch.zeros(2), torch.ones(2), torch.zeros(1, 2), torch.zeros(2, dtype=torch.bfloat16), torch.zeros(0),
        torch.eye(2).to_sparse(), "a", "b", b"a", 1, True, 1.0, torch.zeros(2).numpy(), torch.ones(2).numpy(), None,
    ]  # fmt: skip
    for around in (lambda v: v, lambda v: {"k": v}, lambda v: [v, 1], lambda v: {"k": [Sample((v,))]}):
        found = [tuple(of_leaves(around(value))) for value in values]
        assert len(set(found)) == len(values)
        assert found == [tuple(of_leaves(around(value))) for value in values]
