"""Process groups that training makes: `strategy.timeout_s` is the limit of each, and a strategy that leaves takes its own along."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flextrain.core.base.registry import STRATEGIES
from flextrain.core.comm.collectives import leave_groups, side_group
from flextrain.core.torch_compat.torch_private import process_groups
from flextrain.strategies.base import Strategy
from flextrain.testing import WorkerGroup
from flextrain.testing.loop import train

from ..device import DEVICE
from .parity import RECIPES, data, started

pytestmark = pytest.mark.distributed
SECONDS = 77.0


def limits(spec: dict[str, Any], name: str) -> list[float]:
    """Seconds, of each group of this process after two updates."""
    recipe = RECIPES["accumulate-clip"]
    with started(spec | dict(timeout_s=SECONDS), name, recipe) as session:
        train(session.strategy, session.model, session.optim, data(name, recipe, 2))
        backends = [group._get_backend(torch.device("cpu")) for group in process_groups()]
        return [backend.options._timeout.total_seconds() for backend in backends]


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        pytest.param(dict(type="MeshStrategy", tp=2, plan="auto"), "llama", id="tp"),
        pytest.param(dict(type="MeshStrategy", cp=2), "llama", id="cp", marks=pytest.mark.full),
        pytest.param(dict(type="MeshStrategy", dp_shard=2, ep=2), "mixtral", id="ep", marks=pytest.mark.full),
        pytest.param(dict(type="MeshStrategy", pp=2), "llama_tied", id="pp"),
        pytest.param(dict(type="FSDPStrategy", wrap="blocks"), "llama", id="fsdp"),
        pytest.param(dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=3)), "llama", id="zero3", marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_every_group_follows_the_strategy(workers2: WorkerGroup, spec: dict[str, Any], name: str) -> None:
    for found in workers2.run(limits, spec, name):
        assert len(found) > 1  # beside the default group there is that of the CPU's messages, at least
        assert set(found) == {SECONDS}


def in_a_programs_group(spec: dict[str, Any], name: str) -> None:
    """In a worker: two strategies of a program that has a process group already, and makes another between them."""
    recipe = RECIPES["accumulate-clip"]
    of_device = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}
    torch.distributed.init_process_group(of_device[DEVICE])
    first, second = (STRATEGIES.build({"device": DEVICE, **spec}, "strategy") for _ in range(2))

    def training(strategy: Strategy) -> Callable[[], Any]:
        model, optim = strategy.setup(recipe.model(name), recipe.optim())
        return lambda: train(strategy, model, optim, data(name, recipe, 2))

    def groups_after_one_more() -> int:
        strategy = STRATEGIES.build({"device": DEVICE, **spec}, "strategy")
        training(strategy)()
        strategy.leave()
        return len(process_groups())

    shared = groups_after_one_more()  # those of all strategies stay, such as that of the CPU's messages
    assert groups_after_one_more() == shared
    second.join()
    of_the_program = torch.distributed.new_group()
    of_first = training(first)  # its groups are younger than what the other has found
    of_second = training(second)
    assert len(process_groups()) > shared + 1
    of_second()
    second.leave()
    of_first()
    first.leave()
    assert len(process_groups()) == shared + 1
    leave_groups([side_group(), of_the_program])  # of which the first is everybody's
    assert len(process_groups()) == shared
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        pytest.param(dict(type="MeshStrategy", tp=2, plan="auto"), "llama", id="tp"),
        pytest.param(dict(type="MeshStrategy", pp=2), "llama_tied", id="pp", marks=pytest.mark.full),
        pytest.param(dict(type="MeshStrategy", cp=2), "llama", id="cp", marks=pytest.mark.full),
        pytest.param(dict(type="MeshStrategy", dp_shard=2, ep=2), "mixtral", id="ep", marks=pytest.mark.full),
        pytest.param(dict(type="FSDPStrategy", replicate_size=2), "llama", id="fsdp"),
    ],
)
def test_a_strategy_takes_its_own_groups_along(workers2: WorkerGroup, spec: dict[str, Any], name: str) -> None:
    workers2.run(in_a_programs_group, spec, name)
