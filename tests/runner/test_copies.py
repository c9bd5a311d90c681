"""Two processes for each part of the data train, augment, evaluate, log and save as half as many processes do, bit for bit."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from flextrain import ConfigError, DataShard, DDPStrategy, FSDPStrategy, SingleDeviceStrategy, StrategyError, Topology
from flextrain.core.checkpoint import Checkpoint
from flextrain.testing import WorkerGroup, check_strategy

from .copies import DDPCopies, FSDPCopies
from .training import (
    SGD,
    Accuracy,
    Net,
    Samples,
    SaveEvery,
    Watch,
    data_workers,
    differences,
    make_runner,
    whole,
    whole_state,
)

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("quick")]

CLOCK = re.compile("time|memory|eta|date|experiment|cfg")
TIMES = re.compile(r"(eta|time|data_time|memory): \S+ *")


class Weighed(Net):
    """Counts the samples of its batches, and keeps running statistics of what it trains on."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(8))

    def loss_weight(self, data: Any) -> int:
        return len(data["y"])


class Seen(nn.Module):
    """As torchmetrics' metrics that keep what they see in lists, without their package."""

    process_group: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def update(self, index: Tensor, logits: Tensor, y: Tensor) -> None:
        self.seen.append(torch.cat([index[:, None].double(), logits.double()], 1))

    def compute(self) -> Tensor:
        own = torch.cat(self.seen)
        if Topology().is_alone:
            return own
        sizes: list[Any] = [None] * torch.distributed.get_world_size(self.process_group)
        torch.distributed.all_gather_object(sizes, own, group=self.process_group)
        return torch.cat(sizes)

    def reset(self) -> None:
        self.seen = []


def read(path: Path) -> dict[str, Any]:
    """All that a checkpoint holds, but for when and by whom it was written."""
    checkpoint = Checkpoint.open(path)
    tensors = {key: torch.empty(info.shape, dtype=info.dtype) for key, info in checkpoint.tensors.items()}
    checkpoint.load(tensors)
    values = json.loads(json.dumps(checkpoint.values))
    del values["meta"]["time"], values["meta"]["experiment_name"]
    hub = values.pop("message_hub")
    hub = {f"hub.{name}": value for part in hub.values() for name, value in part.items()}
    return {**values, **tensors, **{name: value for name, value in hub.items() if not CLOCK.search(name)}}


def life(folder: str, strategy: type, at: int | None = None, **changes: Any) -> dict[str, Any]:
    """Training with everything that asks who else there is; ``at``: resumed from the checkpoint of that update."""
    watch, path = Watch(), Path(folder)
    loader = dict(dataset=Samples(27, noisy=True), batch_size=3, collate_fn="default_collate")
    loader |= data_workers(2)
    options: dict[str, Any] = dict(
        model=Weighed,
        strategy=dict(type=strategy),
        train_dataloader=loader,
        optim_wrapper=dict(optimizer=SGD, accumulative_counts=2, clip_grad=dict(max_norm=0.5)),
        auto_scale_lr=dict(base_batch_size=6),
        train_cfg=dict(max_epochs=2),
        custom_hooks=[watch, SaveEvery({1, 4}), dict(type="EMAHook"), dict(type="SyncBuffersHook")],
        default_hooks=dict(checkpoint=None, logger=dict(interval=3)),
        val_dataloader=dict(loader, dataset=Samples(11)),
        val_cfg={},
        val_evaluator=[dict(type=Accuracy), Seen()],
        randomness=dict(seed=1, diff_rank_seed=True),
        log_level="INFO",
    )
    if at is not None:
        options |= dict(resume=f"{folder}/whole/iter_{at}", randomness=dict(seed=1))
    work_dir = path / ("whole" if at is None else f"from_{at}")
    runner = make_runner(work_dir, **options | changes)
    runner.train()
    runner.train_loop.data.close()
    metrics = runner.val()
    buffers = dict(runner.strategy.module.named_buffers())
    state = {key: value for key, value in whole_state(runner).items() if key.removeprefix("model.") not in buffers}
    state |= {name: whole(buffer).clone() for name, buffer in buffers.items()}
    runner.save_checkpoint(folder, "end" if at is None else f"end_{at}")
    rank, log = runner.rank, Path(runner.log_dir)
    runner.strategy.leave()
    return {
        "trained": watch.trained,
        "losses": torch.stack(watch.losses),
        "state": state,
        "metrics": metrics,
        "lines": [] if rank else _lines(log),
        "checkpoint": {} if rank else read(path / ("end" if at is None else f"end_{at}")),
    }


def _lines(folder: Path) -> list[str]:
    (log,) = folder.glob("*.log")
    lines = [
        TIMES.sub("", line.partition(" - INFO - ")[2]) for line in log.read_text().splitlines() if "(train)" in line
    ]
    (scalars,) = folder.rglob("scalars.json*")
    for line in scalars.read_text().splitlines():
        entry = json.loads(line)
        lines.append(str({key: value for key, value in entry.items() if not CLOCK.search(key)}))
    return lines


def same(found: list[dict[str, Any]], expected: list[dict[str, Any]], partner: Any) -> None:
    """``partner(rank)`` is the process of half as many that a process does the same as."""
    for rank, own in enumerate(found):
        other = expected[partner(rank)]
        assert own["trained"] == other["trained"], f"other samples on rank {rank}"
        assert torch.equal(own["losses"], other["losses"]), f"other losses on rank {rank}"
        assert not differences(own["state"], other["state"]), f"another result on rank {rank}"
        assert own["metrics"] == other["metrics"], f"other metrics on rank {rank}"
    assert found[0]["lines"] == expected[0]["lines"]
    assert len(found[0]["lines"]) >= 4
    assert not differences(found[0]["checkpoint"], expected[0]["checkpoint"])
    assert len(expected[0]["checkpoint"]["rng"]) == len(expected)


@pytest.mark.full
def test_a_part_of_the_data_for_two_processes(tmp_path: Path, workers: Any) -> None:
    """Workers, uneven data, accumulation, loss weights, clipping, averages, metrics, log lines, checkpoints, and resuming."""
    for at in (None, 4):
        expected = workers(2).run(life, str(tmp_path / "two"), DDPStrategy, at)
        found = workers(4).run(life, str(tmp_path / "four"), DDPCopies, at)
        same(found, expected, lambda rank: rank // 2)


@pytest.mark.full
def test_one_part_of_the_data_for_two_processes(tmp_path: Path, workers2: WorkerGroup) -> None:
    for at in (None, 4):
        expected = [life(str(tmp_path / "one"), DDPStrategy, at)]
        same(workers2.run(life, str(tmp_path / "two"), DDPCopies, at), expected, lambda rank: 0)


@pytest.mark.full
def test_sharded_copies(tmp_path: Path, workers: Any) -> None:
    """Under FSDP each copy is sharded over the processes with other parts of the data."""
    plain = dict(train_dataloader=dict(dataset=Samples(24, noisy=True), batch_size=3, collate_fn="default_collate"))
    expected = workers(2).run(life, str(tmp_path / "two"), FSDPStrategy, **plain)
    same(workers(4).run(life, str(tmp_path / "four"), FSDPCopies, **plain), expected, lambda rank: rank % 2)


class Stream(IterableDataset[Any]):
    """Samples of its part of the data, which has fewer than the others; augmented."""

    def __init__(self, part: int) -> None:
        self.part = part

    def __iter__(self) -> Iterator[Any]:
        samples = Samples(60, noisy=True)
        yield from (samples[30 * self.part + i] for i in range(14 - 4 * self.part))


def streams(folder: str, strategy: type, copies: int, workers: int) -> dict[str, Any]:
    part = int(os.environ.get("RANK", 0)) // copies
    loader = dict(loader=DataLoader(Stream(part), batch_size=2, **data_workers(workers)), shard=False)
    return life(
        folder,
        strategy,
        train_dataloader=loader,
        train_cfg=dict(by_epoch=False, max_iters=6),
        auto_scale_lr=None,
        val_dataloader=dict(loader=DataLoader(Stream(part), batch_size=2), shard=False),
    )


@pytest.mark.parametrize("reading", [0, pytest.param(2, marks=pytest.mark.full)])
def test_uneven_streams(tmp_path: Path, workers: Any, reading: int) -> None:
    expected = workers(2).run(streams, str(tmp_path / "two"), DDPStrategy, 1, reading)
    same(workers(4).run(streams, str(tmp_path / "four"), DDPCopies, 2, reading), expected, lambda rank: rank // 2)


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.full)])
def test_copies_conform(workers: Any, world_size: int) -> None:
    some = ("facts", "initial_weights", "accumulation", "clipping", "evaluation", "resume_itself", "resume_to_single")
    assert check_strategy(DDPCopies, world_size=world_size, workers=workers(world_size), only=some).passed


def refused_sampler(folder: str) -> None:
    samples = Samples(24)
    sampler: Any = DistributedSampler(samples, num_replicas=2, rank=int(os.environ["RANK"]))
    runner = make_runner(
        folder, strategy=dict(type=DDPCopies), train_dataloader=DataLoader(samples, batch_size=2, sampler=sampler)
    )
    try:
        with pytest.raises(ConfigError, match=r"train_dataloader.sampler: DistributedSampler deals the data to 2 proc"):
            runner.train()
    finally:
        runner.strategy.leave()


def test_a_sampler_that_deals_by_rank_is_refused(tmp_path: Path, workers2: WorkerGroup) -> None:
    workers2.run(refused_sampler, str(tmp_path))


# The value


class Old(DDPStrategy):
    @property
    def data_shard(self) -> tuple[int, int]:
        return 0, self.topology.world_size


def test_the_property_of_before_is_refused_by_name() -> None:
    with pytest.raises(StrategyError, match=r"Old.data_shard: is never asked, define _arrange\(\) and give Topology"):
        Old()


class Forgets(SingleDeviceStrategy):
    def _arrange(self) -> Any:
        Topology()


def test_a_topology_that_is_none_is_refused_by_name() -> None:
    with pytest.raises(StrategyError, match=r"Forgets._arrange: gave NoneType, return Topology\("):
        Forgets().join()


class Wrong(DDPStrategy):
    """Its topology is one of a table."""

    def __init__(self, which: str) -> None:
        super().__init__()
        self.which = which

    def _arrange(self) -> Topology:
        return WRONG[self.which][0](self.topology.rank)


# What each process says of itself, and what all are told
WRONG: dict[str, tuple[Callable[[int], Topology], str]] = {
    "two report": (lambda rank: Topology(data=DataShard(0, 1)), "all need the same count, and each shard one process"),
    "nobody reports": (
        lambda rank: Topology(data=DataShard(0, 1), reports=False),
        "each shard one process that reports",
    ),
    "nobody reports at all": (lambda rank: Topology(reports=False), "each shard one process that reports"),
    "no group": (
        lambda rank: Topology(data=DataShard(rank, 3)),
        "Topology.data.group: missing, 3 of the 2 processes train on other shards of the data than this one",
    ),
    "another index": (
        lambda rank: Topology(data=DataShard(1 - rank, 2, torch.distributed.group.WORLD)),
        "of 2 there, and has shard",
    ),
    "the same index": (lambda rank: Topology(data=DataShard(0, 2)), "Topology.data.index: 0 is not allowed on rank 1"),
    "only one shares": (
        lambda rank: Topology(data=DataShard(0, 1)) if rank == 0 else Topology(),
        "all need the same count",
    ),
    "only one is wrong": (
        lambda rank: Topology(data=DataShard(3, 2)) if rank else Topology(data=DataShard(0, 1)),
        "Topology.data.index: 3 is not allowed with 2 shards",
    ),
}


def refusal(which: str) -> str:
    strategy = Wrong(which)
    try:
        with pytest.raises(StrategyError) as caught:
            strategy.join()
        with pytest.raises(StrategyError, match="^Topology"):  # a second call does not take it for set up
            strategy.join()
    finally:
        strategy.leave()
    return str(caught.value)


@pytest.mark.parametrize("which", WRONG)
def test_what_does_not_fit_together_is_refused_on_every_process(workers2: WorkerGroup, which: str) -> None:
    assert all(WRONG[which][1] in found for found in workers2.run(refusal, which))


def test_alone_there_is_nothing_to_average() -> None:
    topology, value = Topology(), torch.ones(2)
    assert (topology.shard, topology.is_alone, topology.shares_data, topology.reports) == ((0, 1), True, False, True)
    assert topology.data.mean(value) is value
    assert topology.data.sum(value) is value
