"""Processes with other models or configurations are told what differs first, before anything is wrapped."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flextrain import OptimWrapper
from flextrain.core.base.errors import ConfigError, StrategyError
from flextrain.runner.hooks import Hook, ProfilerHook
from flextrain.testing import WorkerGroup

from .training import Net, Samples, make_runner, validation

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("quick")]

DDP = dict(type="DDPStrategy", timeout_s=30)
FSDP = dict(type="FSDPStrategy", timeout_s=30)
ZERO1 = dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=1), timeout_s=30)
ZERO3 = dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=3), timeout_s=30)


class Varied(Net):
    """A model that one process builds in another way."""

    def __init__(self, way: str = "") -> None:
        super().__init__(width=16 if way == "wider" else 8)
        if way == "longer":
            self.net.append(nn.Linear(2, 2))
        if way == "dtype":
            self.net[3].double()
        if way == "frozen":
            self.net[0].requires_grad_(False)
        if way == "buffer":
            self.register_buffer("seen", torch.zeros(3))
        if way == "tied":
            self.other = self.net[0]
        if way == "order":
            self.net = nn.Sequential(*self.net)
            self.net._modules = dict(reversed(self.net._modules.items()))


MODELS = {
    "wider": "model: net.0.weight: is 8x6 float32 on rank 0 and 16x6 float32 on rank 1",
    "longer": "model: net.4.weight: is 2x2 float32 on rank 1 and missing on rank 0",
    "dtype": "model: net.3.weight: is 2x8 float32 on rank 0 and 2x8 float64 on rank 1",
    "frozen": "model: net.0.weight: is 8x6 float32 on rank 0 and 8x6 float32, frozen on rank 1",
    "buffer": "model: seen: is buffer 3 float32 on rank 1 and missing on rank 0",
    "tied": "model: other.weight: is tied to net.0.weight on rank 1 and missing on rank 0",
    "order": "model: rank 1 has net.3.weight where rank 0 has net.0.weight",
}


def another_model(folder: Path, way: str, strategy: dict[str, Any], is_built: bool) -> str:
    build = partial(Varied, way if os.environ["RANK"] == "1" else "")
    runner = make_runner(folder, model=build() if is_built else build, strategy=strategy)
    try:
        with pytest.raises(StrategyError) as caught:
            runner.train()
    finally:
        runner.strategy.leave()
    return str(caught.value)


@pytest.mark.parametrize("way", MODELS)
def test_another_model(workers2: WorkerGroup, tmp_path: Path, way: str) -> None:
    expected = f"{MODELS[way]}; every process has to build the same model"
    assert workers2.run(another_model, tmp_path, way, DDP, False) == [expected] * 2


@pytest.mark.parametrize(
    "strategy, is_built",
    [
        (FSDP, True),
        pytest.param(FSDP, False, marks=pytest.mark.full),
        pytest.param(ZERO1, True, marks=pytest.mark.deepspeed),
        pytest.param(ZERO3, True, marks=pytest.mark.deepspeed),
        pytest.param(ZERO3, False, marks=pytest.mark.deepspeed),
    ],
    ids=["FSDP", "FSDP without memory", "ZeRO-1", "ZeRO-3", "ZeRO-3 without memory"],
)
def test_under_other_strategies(
    workers2: WorkerGroup, tmp_path: Path, strategy: dict[str, Any], is_built: bool
) -> None:
    expected = f"{MODELS['wider']}; every process has to build the same model"
    assert workers2.run(another_model, tmp_path, "wider", strategy, is_built) == [expected] * 2


def configured(folder: Path, changes: Callable[[int], dict[str, Any]]) -> str:
    try:
        runner = make_runner(folder, **{"strategy": DDP, **changes(int(os.environ["RANK"]))})
    except ConfigError as error:
        return str(error)
    runner.train()
    runner.strategy.leave()
    return ""


def other_rate(rank: int) -> dict[str, Any]:
    return dict(optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1 + rank)))


def other_accumulation(rank: int) -> dict[str, Any]:
    return dict(optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1), accumulative_counts=1 + rank))


def other_length(rank: int) -> dict[str, Any]:
    return dict(train_cfg=dict(max_epochs=1 + rank))


def other_strategy(rank: int) -> dict[str, Any]:
    return dict(strategy=(DDP, FSDP)[rank])


def other_option(rank: int) -> dict[str, Any]:
    return dict(strategy={**DDP, "find_unused_parameters": rank == 1})


def other_seed(rank: int) -> dict[str, Any]:
    return dict(randomness=dict(seed=rank))


def no_validation(rank: int) -> dict[str, Any]:
    return validation() if rank == 0 else {}


def no_schedule(rank: int) -> dict[str, Any]:
    return dict(param_scheduler=dict(type="LinearLR") if rank == 0 else None)


def no_checkpoints(rank: int) -> dict[str, Any]:
    return dict(default_hooks={} if rank == 0 else dict(checkpoint=None))


def other_interval(rank: int) -> dict[str, Any]:
    return dict(default_hooks=dict(logger=dict(interval=10 + rank)))


@pytest.mark.parametrize(
    "changes, message",
    [
        (other_rate, "optim_wrapper.optimizer.lr: is 0.1 on rank 0 and 1.1 on rank 1"),
        (other_accumulation, "optim_wrapper.accumulative_counts: is 1 on rank 0 and 2 on rank 1"),
        (other_length, "train_cfg.max_epochs: is 1 on rank 0 and 2 on rank 1"),
        (other_strategy, "strategy.type: is flextrain.strategies.ddp.DDPStrategy on rank 0 and flextrain.strategies.fsdp.strategy.FSDPStrategy on rank 1"),
        (other_option, "strategy.find_unused_parameters: is False on rank 0 and True on rank 1"),
        (other_seed, "randomness.seed: is 0 on rank 0 and 1 on rank 1"),
        (no_validation, "val_dataloader: is given on rank 0 and not given on rank 1"),
        (no_schedule, "param_scheduler.type: is 'LinearLR' on rank 0 and missing on rank 1"),
        (no_checkpoints, "CheckpointHook: is a hook on rank 0 and missing on rank 1"),
        (other_interval, "LoggerHook.interval: is 10 on rank 0 and 11 on rank 1"),
    ],
)  # fmt: skip
def test_another_configuration(
    workers2: WorkerGroup, tmp_path: Path, changes: Callable[[int], dict[str, Any]], message: str
) -> None:
    expected = f"{message}; every process has to be configured alike"
    assert workers2.run(configured, tmp_path, changes) == [expected] * 2


def built_otherwise(folder: Path, strategy: dict[str, Any]) -> str:
    rank = int(os.environ["RANK"])
    wrapper = OptimWrapper(dict(type="AdamW", lr=0.1 + rank), accumulative_counts=2)
    runner = make_runner(folder, strategy=strategy, optim_wrapper=wrapper)
    with pytest.raises(StrategyError) as caught:
        runner.train()
    runner.strategy.leave()
    return str(caught.value)


@pytest.mark.parametrize(
    "strategy", [DDP, FSDP, pytest.param(ZERO1, marks=pytest.mark.deepspeed)], ids=["DDP", "FSDP", "ZeRO-1"]
)
def test_an_instance_with_other_settings(workers2: WorkerGroup, tmp_path: Path, strategy: dict[str, Any]) -> None:
    expected = (
        "optim_wrapper.optimizer group 0 lr: is 0.1 on rank 0 and 1.1 on rank 1; every process has to be configured"
    )
    for message in workers2.run(built_otherwise, tmp_path, strategy):
        assert message.startswith(expected)


class Looks(Hook):
    """A hook of the user's."""


def collate(batch: list[Any]) -> Any:
    return torch.utils.data.default_collate(batch)


def what_may_differ(rank: int) -> dict[str, Any]:
    def named(batch: list[Any]) -> Any:
        return collate(batch)

    return dict(
        train_dataloader=dict(batch_size=4, dataset=Samples(26), collate_fn=(collate, named)[rank]),
        custom_hooks=[Looks(), ProfilerHook(by_epoch=False)] if rank == 0 else [],
        train_cfg=dict(max_epochs=1),
        log_level=("INFO", "ERROR")[rank],
        experiment_name=f"rank {rank}",
        env_cfg=dict(resource_limit=4096 + rank),
    )


def test_what_may_differ(workers2: WorkerGroup, tmp_path: Path) -> None:
    assert workers2.run(configured, tmp_path, what_may_differ) == ["", ""]
