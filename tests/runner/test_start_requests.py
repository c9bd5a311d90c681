"""What a start costs: requests to the job's store and collective calls, by the number of processes."""

from __future__ import annotations

import datetime
import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.torch_version import TorchVersion
from torch.utils.data import TensorDataset

from flextrain import FlexibleRunner
from flextrain.core.comm import collectives
from flextrain.runner.hooks import Hook
from flextrain.testing import WorkerGroup
from flextrain.testing.simulation import Simulation

STAGES = ("FlexibleRunner()", "set-up", "first iteration", "save and end")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": ((self.layers(x) - y) ** 2).mean()}


class Counts(Hook):
    """Notes what this rank has asked and called so far, when a stage of its run is over."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation, self.rank = simulation, int(os.environ["RANK"])
        self.seen = [self.now()]

    def now(self) -> Counter[str]:
        simulation = self.simulation
        return Counter(requests=simulation.store.requests[self.rank], calls=simulation.counts.calls[self.rank])

    def before_train(self, runner: FlexibleRunner) -> None:
        self.seen.append(self.now())

    def after_train_iter(self, runner: FlexibleRunner, *_: Any, **__: Any) -> None:
        self.seen.append(self.now())

    def stages(self) -> list[Counter[str]]:
        return [after - before for before, after in zip(self.seen, self.seen[1:], strict=False)]


def start(simulation: Simulation, folder: Path, strategy: str, resume: bool) -> list[Counter[str]]:
    """What each stage of one rank's run costs; it trains one update more than before."""
    counts = Counts(simulation)
    data = TensorDataset(torch.zeros(64, 4), torch.zeros(64, 1))
    runner = FlexibleRunner(
        model=Net,
        work_dir=folder,
        strategy=strategy,
        resume=resume,
        train_dataloader=dict(batch_size=1, dataset=data, collate_fn=dict(type="default_collate")),
        optim_wrapper=dict(optimizer=dict(type="AdamW", lr=1e-3)),
        train_cfg=dict(by_epoch=False, max_iters=2 if resume else 1),
        default_hooks=dict(checkpoint=dict(interval=1, by_epoch=False)),
        custom_hooks=[counts],
        env_cfg=dict(preemption=False, watchdog=False),  # their threads ask the store every few seconds
        randomness=dict(seed=0),
    )
    counts.seen.append(counts.now())
    runner.train()
    counts.seen.append(counts.now())
    return counts.stages()


@pytest.mark.parametrize(
    "strategy, sizes",
    [
        pytest.param("ddp", (2, 4), marks=pytest.mark.full),
        pytest.param("fsdp", (4, 8), marks=pytest.mark.full),
        pytest.param("mesh:tp2", (4, 8), marks=pytest.mark.full),
    ],
)
def test_a_start_grows_linearly_with_the_processes(tmp_path: Path, strategy: str, sizes: tuple[int, int]) -> None:
    """Every rank asks and calls as often in a job of twice as many: rank 0 too, which serves the store."""
    found: dict[tuple[int, bool], list[list[Counter[str]]]] = {}
    for size in sizes:
        for resume in (False, True):
            simulation = Simulation(size)
            found[size, resume] = simulation.run(start, simulation, tmp_path / str(size), strategy, resume)
    for resume in (False, True):
        for number, stage in enumerate(STAGES):
            for kind in ("requests", "calls"):
                few, many = (max(rank[number][kind] for rank in found[size, resume]) for size in sizes)
                assert many <= few + 1, (stage, kind, resume, few, many)
                assert (many == 0) == (stage == "first iteration" and kind == "requests")


class CountingStore(dist.Store):  # type: ignore[misc,name-defined,unused-ignore]
    """A store for threads, which counts requests."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, bytes] = {}
        self.changed, self.requests = threading.Condition(), 0

    def set(self, key: str, value: Any) -> None:
        with self.changed:
            self.requests += 1
            self.values[key] = bytes(value)
            self.changed.notify_all()

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self.values[key]

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        with self.changed:
            self.requests += 1
            self.changed.wait_for(lambda: all(key in self.values for key in keys), 20.0)


def gloo_requests(size: int) -> int:
    """Requests to the store for a group of gloo's and two collectives; its ranks are threads."""
    store, results = CountingStore(), [torch.full((3,), float(rank)) for rank in range(size)]

    def be(rank: int) -> None:
        timeout = datetime.timedelta(seconds=20)
        group = dist.ProcessGroupGloo(dist.PrefixStore("group", store), rank, size, timeout)  # type: ignore[attr-defined]
        group.allreduce([results[rank]]).wait()
        group.barrier().wait()

    threads = [threading.Thread(target=be, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [result.tolist() for result in results] == [[size * (size - 1) / 2] * 3] * size
    return store.requests


@pytest.mark.skipif(TorchVersion(torch.__version__) < "2.8", reason="torch knows TORCH_GLOO_LAZY_INIT since 2.8")
def test_many_processes_connect_when_they_need_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_GLOO_LAZY_INIT", raising=False)
    at_once = gloo_requests(16)
    assert at_once >= 16 * 16
    collectives._connect_late(255)
    assert "TORCH_GLOO_LAZY_INIT" not in os.environ
    monkeypatch.setattr(collectives, "_CONNECT_LATE_FROM", 16)
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "0")
    collectives._connect_late(16)
    assert os.environ["TORCH_GLOO_LAZY_INIT"] == "0"  # the user's
    monkeypatch.delenv("TORCH_GLOO_LAZY_INIT")
    collectives._connect_late(16)
    late = gloo_requests(16)
    os.environ.pop("TORCH_GLOO_LAZY_INIT")
    assert late < at_once / 1.5


def late_job() -> list[Any]:
    """Joins a job whose processes connect late, through everything that uses gloo."""
    collectives._CONNECT_LATE_FROM = 2
    try:
        collectives.init_process_group(
            "gloo", rank=int(os.environ["RANK"]), world_size=2, init_method="env://", timeout_s=30.0
        )
        side = collectives.side_group(purpose="late")
        found = [os.environ.pop("TORCH_GLOO_LAZY_INIT"), collectives.all_gather_object("a", side)]
        found += [collectives.broadcast_object(collectives.get_rank()), collectives.gather_object("b", side)]
        found += [collectives.all_reduce(torch.ones(3)).tolist()]
        collectives.barrier()
    finally:
        collectives._CONNECT_LATE_FROM = 256
        collectives.destroy_process_group()
    return found


@pytest.mark.distributed
def test_a_job_whose_processes_connect_late(workers2: WorkerGroup) -> None:
    first, second = workers2.run(late_job)
    assert first == ["1", ["a", "a"], 0, ["b", "b"], [2.0, 2.0, 2.0]]
    assert second == ["1", ["a", "a"], 0, None, [2.0, 2.0, 2.0]]
