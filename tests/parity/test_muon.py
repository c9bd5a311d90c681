"""Muon under every strategy makes the training run of one device, with two messages per update and each matrix once in them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from flextrain import OptimWrapper, SingleDeviceStrategy
from flextrain.core.comm import collectives as dist
from flextrain.optim import owners
from flextrain.testing import WorkerGroup
from flextrain.testing.differences import same_tensors
from flextrain.testing.loop import alone, train
from flextrain.testing.sessions import load, save, whole_state

from ..conftest import WorkerFactory
from ..device import DEVICE
from ..mesh.models import MATRICES
from ..mesh.parity import Recipe, compare, data, dtype_of, started
from ..mesh.test_parity import EXPERTS, OF_MIXTURES
from ..strategies.test_foreign_optimizers import Shampoo

pytestmark = pytest.mark.distributed


@dataclass(frozen=True)
class OfMatrices(Recipe):
    """Muon in float64, so that rounding is not magnified, and AdamW for the rest."""

    lr: float = 0.01
    parts: int | None = None
    bucket_mb: float = 128.0
    paramwise: bool = False

    def optim(self) -> OptimWrapper:
        options: dict[str, Any] = dict(
            type="Muon", lr=self.lr, weight_decay=0.05, ns_dtype="float64", bucket_mb=self.bucket_mb
        )
        options["others"] = dict(
            type="AdamW", lr=3e-3, weight_decay=0.05, **({} if self.eps is None else dict(eps=self.eps))
        )
        if self.parts is not None:
            options["parts"] = {"layers.*.qkv": self.parts}
        more: dict[str, Any] = {} if self.clip is None else dict(clip_grad=dict(max_norm=self.clip))
        if self.paramwise:
            keys = {
                "layers.0": dict(lr_mult=0.5),
                "embed": dict(lr_mult=3.0, betas=(0.8, 0.9)),
                "down": dict(momentum=0.8),
            }
            more["paramwise_cfg"] = dict(custom_keys=keys, norm_decay_mult=0.0, bias_lr_mult=2.0)
        return OptimWrapper(options, accumulative_counts=self.accumulate, **more)


RECIPE = OfMatrices(accumulate=2)
STRATEGIES: dict[str, tuple[int, dict[str, Any], str, OfMatrices]] = {
    "ddp": (2, dict(type="DDPStrategy"), "plain", RECIPE),
    "fsdp": (2, dict(type="FSDPStrategy", wrap="blocks"), "fused", dataclasses.replace(RECIPE, parts=3)),
    "small buckets": (2, dict(type="FSDPStrategy"), "plain", dataclasses.replace(RECIPE, bucket_mb=0.05, paramwise=True)),
    "one at a time": (2, dict(type="FSDPStrategy"), "plain", dataclasses.replace(RECIPE, bucket_mb=1e-6, clip=None)),
    "tp2": (2, dict(type="MeshStrategy", tp=2, plan=MATRICES), "plain", RECIPE),
    "pp2": (2, dict(type="MeshStrategy", pp=2), "plain_tied", RECIPE),
    "ep2": (2, dict(type="MeshStrategy", dp_shard=2, ep=2, plan=EXPERTS), "mixture", RECIPE),
    "fsdp4": (4, dict(type="FSDPStrategy"), "fused", dataclasses.replace(RECIPE, parts=3, paramwise=False)),
    "hsdp": (4, dict(type="FSDPStrategy", replicate_size=2), "plain", RECIPE),
    "tp2xfsdp2": (4, dict(type="MeshStrategy", tp=2, dp_shard=2, plan=MATRICES), "plain", RECIPE),
    "tp2xep2": (4, dict(type="MeshStrategy", tp=2, dp_shard=2, ep=2, plan={**OF_MIXTURES, **EXPERTS}), "mixture", RECIPE),
    "ep2xfsdp2": (4, dict(type="MeshStrategy", dp_shard=4, ep=2, plan=EXPERTS), "mixture", RECIPE),
    "pp2xfsdp2": (4, dict(type="MeshStrategy", pp=2, dp_shard=2), "plain_tied", RECIPE),
    "replicate2xtp2": (4, dict(type="MeshStrategy", dp_replicate=2, tp=2, plan=MATRICES), "plain", RECIPE),
}  # fmt: skip
QUICK = ("small buckets", "tp2", "ep2")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in STRATEGIES]
)
def test_trains_as_on_one_device(workers: WorkerFactory, name: str) -> None:
    size, options, model, recipe = STRATEGIES[name]
    traces = workers(size).run(compare, options, model, recipe, tolerance=1e-10)
    assert all(trace == traces[0] for trace in traces)
    assert sum(traces[0].losses[-5:]) < sum(traces[0].losses[:5])


# What is sent


def messages_of(options: Mapping[str, Any], model: str, bucket_mb: float) -> tuple[int, int, int, int, int]:
    """Of one update: messages, bytes sent by all processes, the matrices that Muon updates, their bytes, and the largest message."""
    recipe = dataclasses.replace(RECIPE, accumulate=1, bucket_mb=bucket_mb)
    sent: list[int] = []
    original = owners.start_exchange

    def counting(message: Tensor, *args: Any) -> Any:
        sent.append(message.nbytes)
        return original(message, *args)

    with dtype_of(torch.float64), started(options, model, recipe) as session:
        train(session.strategy, session.model, session.optim, data(model, recipe, 1))
        matrices = [p for group in session.optim.param_groups if "ns_steps" in group for p in group["params"]]
        for group in session.optim.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        owners.start_exchange = counting
        try:
            with CommDebugMode() as mode, session.optim.adapter.stepping():
                session.optim.optimizer.step()
        finally:
            owners.start_exchange = original
        assert mode.get_total_counts() == len(sent)  # nothing else is sent
        size = int(dist.all_reduce(torch.tensor(sum(sent))))
        return len(sent), size, len(matrices), sum(p.nbytes for p in matrices), max(sent)


@pytest.mark.parametrize("bucket_mb", [128.0, 1e-6])
def test_two_messages_in_which_each_matrix_is_once(workers2: WorkerGroup, bucket_mb: float) -> None:
    for messages, size, matrices, total, largest in workers2.run(
        messages_of, dict(type="FSDPStrategy"), "plain", bucket_mb
    ):
        assert messages <= (2 if bucket_mb > 1 else 2 * matrices)
        assert 0 < size <= 2 * total  # what an owner has of a matrix is not sent, so that it is less
        assert bucket_mb > 1 or largest <= 64 * 32 * 8  # a matrix at a time


@pytest.mark.full
def test_nothing_is_sent_of_whole_experts(workers2: WorkerGroup) -> None:
    options = dict(type="MeshStrategy", dp_shard=2, ep=2, plan={"layers.*.experts": "experts"}, wrap="model")
    messages, size, _, total, _ = workers2.run(messages_of, options, "mixture", 128.0)[0]
    assert messages == 2
    assert size < total  # attention's alone


# Checkpoints, and optimizers of users


class WholeShampoo(Shampoo):
    """Keeps a matrix for each dimension of a whole parameter."""

    owns_whole = True

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            group["updates"] = group.get("updates", 0) + 1


@dataclass(frozen=True)
class OfUsers(Recipe):
    lr: float = 0.02

    def optim(self) -> OptimWrapper:
        return OptimWrapper(dict(type=WholeShampoo, lr=self.lr), clip_grad=dict(max_norm=1.0))


def states_after(path: Path, recipe: Recipe, model: str, first: Any, second: Any, updates: int = 3) -> list[Any]:
    """The whole state after some updates under one strategy and as many under another, and that of one device."""
    torch.set_num_threads(1)
    windows = data(model, recipe, 2 * updates)
    with dtype_of(torch.float64):
        with started(first, model, recipe) as session:
            train(session.strategy, session.model, session.optim, windows[:updates])
            save(session, path)
        with started(second, model, recipe) as session:
            load(session, path)
            train(session.strategy, session.model, session.optim, windows[updates:])
            held = [
                (tuple(value.shape), isinstance(value, DTensor))
                for state in session.optim.optimizer.state.values()
                for value in state.values()
                if value.ndim == 2
            ]
            found = whole_state(session.strategy)
        with alone():
            strategy = SingleDeviceStrategy(device=DEVICE)
            called, optim = strategy.setup(recipe.model(model), recipe.optim())
            train(strategy, called, optim, windows)  # type: ignore[arg-type]
            expected = whole_state(strategy)
            strategy.leave()
    return [found, expected, held]


def check_states(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Raise if two whole states differ in a key, in a value, or in a tensor by more than rounding."""
    assert found.keys() == expected.keys()
    tensors = [{key: value for key, value in each.items() if isinstance(value, Tensor)} for each in (found, expected)]
    same_tensors(*tensors, "the state", 1e-10)
    values = [
        {key: value for key, value in each.items() if not isinstance(value, Tensor)} for each in (found, expected)
    ]
    assert values[0] == values[1]


RESUMES = [
    pytest.param(dict(type="FSDPStrategy"), dict(type="MeshStrategy", tp=2, plan=MATRICES), id="fsdp-tp"),
    pytest.param(dict(type="DDPStrategy"), dict(type="FSDPStrategy"), marks=pytest.mark.full, id="ddp-fsdp"),
    pytest.param(dict(type="MeshStrategy", pp=2), dict(type="FSDPStrategy"), marks=pytest.mark.full, id="pp-fsdp"),
]


@pytest.mark.parametrize("first, second", RESUMES)
def test_muon_goes_on_under_another_strategy(
    workers2: WorkerGroup, tmp_path: Path, first: dict[str, Any], second: dict[str, Any]
) -> None:
    for found, expected, held in workers2.run(states_after, tmp_path / "c", RECIPE, "plain", first, second):
        check_states(found, expected)
        assert found["optim.group.embed.weight.optimizer"] == "AdamW"
        assert found["optim.group.layers.0.q.weight.optimizer"] == "Muon"
        assert held
        assert all(is_sharded for _, is_sharded in held if second["type"] == "FSDPStrategy")


@pytest.mark.parametrize("first, second", RESUMES)
def test_an_optimizer_that_owns_whole_parameters(
    workers2: WorkerGroup, tmp_path: Path, first: dict[str, Any], second: dict[str, Any]
) -> None:
    results = workers2.run(states_after, tmp_path / "c", OfUsers(), "plain", first, second)
    for found, expected, _ in results:
        check_states(found, expected)
    if second["type"] == "FSDPStrategy":  # each state is at one owner, whole
        assert not any(is_sharded for *_, held in results for _, is_sharded in held)
        kept = [len(held) for *_, held in results]
        total = sum(value.ndim == 2 for key, value in results[0][1].items() if key.startswith("optim.state."))
        assert sum(kept) == total
        assert min(kept) > 0
