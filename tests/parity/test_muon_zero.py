"""Optimizers that look at whole matrices under DeepSpeed's ZeRO, whose engine gives them ranges of flat tensors.

ZeRO trains in float32, and so does the one device that it is compared with; Muon iterates in float64. ``test_owners.py`` has the owners of flat
ranges in float64.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from flextrain import FlexibleRunner
from flextrain.core.base.errors import StrategyError
from flextrain.core.comm import collectives as dist
from flextrain.optim import owners
from flextrain.optim.wrapper import OptimWrapper
from flextrain.strategies.deepspeed.config import ZeroOptimization
from flextrain.strategies.deepspeed.whole_parameters import check_offloading
from flextrain.testing import WorkerGroup
from flextrain.testing.differences import same_tensors
from flextrain.testing.loop import train

from ..conftest import WorkerFactory
from ..mesh.models import Plain
from ..mesh.parity import EPS, Recipe, compare, data, dtype_of, started
from . import test_muon
from .test_muon import OfMatrices, OfUsers, states_after

pytestmark = [pytest.mark.distributed, pytest.mark.deepspeed]

TOLERANCE = 1e-5  # as tests/mesh/parity.py asks for in float32, with this epsilon of AdamW
RECIPE = OfMatrices(accumulate=2, eps=EPS[torch.float32])
FUSED = dataclasses.replace(RECIPE, parts=3, paramwise=True, clip=None, bucket_mb=0.5, accumulate=1)


def zero(stage: int, **options: Any) -> dict[str, Any]:
    return dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=stage, **options))


ON_CPU = dict(offload_optimizer=dict(device="cpu", pin_memory=False))


class Sometimes(Plain):
    """Has a layer that the second forward leaves out."""

    def __init__(self) -> None:
        super().__init__()
        # Of a size with which the cut between two processes at stages 1 and 2 is in a row of layers.0.down.
        self.extra, self._calls = nn.Linear(30, 32, bias=False), 0

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor | dict[str, Tensor]:
        self._calls += 1
        x = self.embed(input_ids) + self.position(torch.arange(input_ids.shape[1], device=input_ids.device))
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        logits: Tensor = self.head(x if self._calls == 2 else x + self.extra(x[..., :30]))
        assert labels is not None
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


@dataclasses.dataclass(frozen=True)
class OfSometimes(OfMatrices):
    """Some matrices are frozen, as under LoRA, and one has no gradient in the second update."""

    def model(self, name: str) -> nn.Module:
        torch.manual_seed(7)
        model = Sometimes()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(("layers.0.q", "layers.1.up")))
        return model


SOMETIMES = OfSometimes(eps=EPS[torch.float32])


class Decaying(test_muon.WholeShampoo):
    """Moves what has a gradient, also one of zeros."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            parameter.detach().mul_(0.99)
        super().step()


@dataclasses.dataclass(frozen=True)
class OfUsersSometimes(OfUsers):
    """The same of an optimizer that owns whole parameters, one of which has no gradient in the second update."""

    def optim(self) -> OptimWrapper:
        return OptimWrapper(dict(type=Decaying, lr=self.lr), clip_grad=dict(max_norm=1.0))

    def model(self, name: str) -> nn.Module:
        torch.manual_seed(7)
        return Sometimes()


TRAINED: dict[str, tuple[int, dict[str, Any], str, Recipe]] = {
    "zero1": (2, zero(1), "plain", RECIPE),
    "zero2": (2, zero(2), "plain", RECIPE),
    "zero3": (2, zero(3), "plain", RECIPE),
    "zero1, parts and groups": (2, zero(1), "fused", FUSED),
    "zero3, parts and groups": (2, zero(3), "fused", FUSED),
    "zero3, sub-groups, tied": (2, zero(3, sub_group_size=3000), "plain_tied", RECIPE),
    "zero1, experts": (2, zero(1), "mixture", RECIPE),
    "zero1, sometimes": (2, zero(1), "plain", SOMETIMES),
    "zero3, sometimes": (2, zero(3), "plain", SOMETIMES),
    "zero2 on the CPU": (2, zero(2, **ON_CPU), "plain", RECIPE),
    "zero3 on the CPU": (2, zero(3, **ON_CPU), "plain", RECIPE),
    "zero0": (2, zero(0), "plain", RECIPE),
    "zero1, one process": (1, zero(1), "plain", RECIPE),
    "zero1, four processes": (4, zero(1), "plain", SOMETIMES),
    "zero2, four processes": (4, zero(2), "plain", RECIPE),
    "zero3, four processes": (4, zero(3), "plain", SOMETIMES),
    "zero1 of users": (2, zero(1), "plain", OfUsers()),
    "zero1 of users, sometimes": (2, zero(1), "plain", OfUsersSometimes()),
    "zero3 of users": (2, zero(3, sub_group_size=3000), "plain", OfUsers()),
}
QUICK = ("zero1, sometimes", "zero3")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in TRAINED]
)
def test_trains_as_on_one_device(workers: WorkerFactory, name: str) -> None:
    size, options, model, recipe = TRAINED[name]
    # The eigenvalues of Shampoo's matrices magnify rounding.
    tolerance = 1e-3 if isinstance(recipe, OfUsers) else TOLERANCE
    traces = workers(size).run(compare, options, model, recipe, torch.float32, tolerance=tolerance)
    assert all(trace == traces[0] for trace in traces)
    assert sum(traces[0].losses[-5:]) < sum(traces[0].losses[:5])


# What is sent


def messages_of(options: dict[str, Any], recipe: Recipe) -> tuple[int, int, int, int]:
    """Of one update: messages, elements that all processes send to owners and back, matrices, and their elements."""
    sent: list[int] = []
    original = owners.start_exchange

    def counting(message: Tensor, *args: Any) -> Any:
        sent.append(message.numel())
        return original(message, *args)

    with started(options, "plain", recipe) as session:
        windows = data("plain", recipe, 2)
        train(session.strategy, session.model, session.optim, windows[:1])
        owners.start_exchange = counting
        try:
            train(session.strategy, session.model, session.optim, windows[1:])
        finally:
            owners.start_exchange = original
        state = session.strategy.state()
        matrices = [v for key, v in state.items() if key.endswith(".momentum_buffer")]
        size = int(dist.all_reduce(torch.tensor(sum(sent))))
        return len(sent), size, len(matrices), sum(v.numel() for v in matrices)


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.full), 3])
def test_two_messages_in_which_each_matrix_is_once(workers2: WorkerGroup, stage: int) -> None:
    for messages, size, matrices, total in workers2.run(messages_of, zero(stage), SOMETIMES):
        assert matrices == 11
        assert messages == 2  # all are in one group
        assert (
            0 < size <= 1.1 * total
        )  # what an owner has of a matrix is not sent: half of it at stage 3, all but one matrix at stage 1


# Checkpoints


def resumed(path: Path, recipe: Recipe, first: Any, second: Any) -> dict[str, Any]:
    """Raise if the whole state, after some updates under each strategy, is not that of one device."""
    original, test_muon.dtype_of = test_muon.dtype_of, lambda _: dtype_of(torch.float32)
    try:
        found, expected, _ = states_after(path, recipe, "plain", first, second)
    finally:
        test_muon.dtype_of = original
    assert found.keys() == expected.keys()
    tensors = [{key: value for key, value in each.items() if isinstance(value, Tensor)} for each in (found, expected)]
    same_tensors(*tensors, "the state", 1e-3 if isinstance(recipe, OfUsers) else TOLERANCE)
    values = [{k: v for k, v in each.items() if not isinstance(v, Tensor)} for each in (found, expected)]
    assert values[0] == values[1]
    return {key: tuple(value.shape) for key, value in tensors[0].items()}


RESUMES = [
    pytest.param(dict(type="FSDPStrategy"), zero(3), id="fsdp-zero3"),
    pytest.param(zero(3), dict(type="FSDPStrategy"), id="zero3-fsdp", marks=pytest.mark.full),
    pytest.param(zero(1), zero(3, sub_group_size=3000), id="zero1-zero3", marks=pytest.mark.full),
    pytest.param(zero(2), dict(type="DDPStrategy"), id="zero2-ddp", marks=pytest.mark.full),
]


@pytest.mark.parametrize("first, second", RESUMES)
@pytest.mark.parametrize("recipe", [RECIPE, pytest.param(OfUsers(), marks=pytest.mark.full)], ids=["muon", "users"])
def test_goes_on_under_another_strategy(
    workers2: WorkerGroup, tmp_path: Path, recipe: Recipe, first: dict[str, Any], second: dict[str, Any]
) -> None:
    for shapes in workers2.run(resumed, tmp_path / "c", recipe, first, second):
        if recipe is RECIPE:
            assert shapes["optim.state.layers.0.up.weight.momentum_buffer"] == (64, 32)
        else:
            assert shapes["optim.state.layers.0.up.weight.precond_1"] == (32, 32)


# What is refused


def refusal(options: dict[str, Any], optimizer: dict[str, Any]) -> str:
    class Refused(Recipe):
        def optim(self) -> OptimWrapper:
            return OptimWrapper(optimizer)

    with pytest.raises(StrategyError) as raised, started(options, "plain", Refused()):
        pass
    return str(raised.value)


class Diminishing(test_muon.WholeShampoo):
    """Counts its steps where no checkpoint looks."""

    steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        for group in self.param_groups:
            group["lr"] /= self.steps
        super().step()


MUON = dict(type="Muon", lr=0.01, others=dict(type="AdamW", lr=0.01))
REFUSED = [
    (
        dict(offload_optimizer=dict(device="cpu", ratio=0.5)),
        MUON,
        "strategy.zero_optimization.offload_optimizer.ratio: 0.5 is not possible with Muon",
    ),
    (
        {},
        dict(type="Muon", others=dict(type="Adagrad")),
        'optim_wrapper.optimizer.type: "Adagrad" is rebuilt by DeepSpeed',
    ),
    ({}, dict(type=Diminishing, lr=0.1), "optim_wrapper.optimizer: Diminishing keeps values outside"),
]


def test_state_in_files_is_refused_in_one_line(tmp_path: Path) -> None:
    options = dict(stage=3, offload_optimizer=dict(device="nvme", nvme_path=tmp_path))
    wrapper = OptimWrapper(MUON)
    model = Plain()
    wrapper.examine(model)
    wrapper.build(model)
    message = r'offload_optimizer\.device: "nvme" is not possible with Muon, whose owners need parameters in memory; give device="cpu"$'
    with pytest.raises(StrategyError, match=message):
        check_offloading(wrapper, ZeroOptimization(**options))


@pytest.mark.full
@pytest.mark.parametrize("options, optimizer, message", REFUSED)
def test_refused_in_one_line(
    workers1: WorkerGroup, options: dict[str, Any], optimizer: dict[str, Any], message: str
) -> None:
    (found,) = workers1.run(refusal, zero(3, **options), optimizer)
    assert found.startswith(message)
    assert "\n" not in found


class Small(nn.Module):
    """A model that stage 3 builds without memory, as it is given as a class."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.last(torch.tanh(self.first(x))) - 1).square().mean()}


def losses_of(strategy: Any, work_dir: str, batch_size: int) -> list[float]:
    """Losses of a run whose model is given as a class."""
    torch.set_num_threads(1)
    runner = FlexibleRunner(
        model=Small,
        strategy=strategy,
        train_dataloader=dict(
            dataset=[{"x": row} for row in torch.randn(32, 6, generator=torch.Generator().manual_seed(1))],
            batch_size=batch_size,
            collate_fn="default_collate",
        ),
        optim_wrapper=dict(optimizer=dict(type="Muon", lr=0.02, others=dict(type="AdamW", lr=0.01))),
        train_cfg=dict(max_epochs=1),
        randomness=dict(seed=0),
        log_processor=dict(window_size=1),
        default_hooks=dict(checkpoint=None, logger=dict(interval=1)),
        work_dir=work_dir,
        log_level="ERROR",
    )
    runner.train()
    return list(runner.message_hub.get_scalar("train/loss").data[0])


def test_a_model_that_is_built_without_memory(workers2: WorkerGroup, tmp_path: Path) -> None:
    expected = losses_of("single", str(tmp_path / "single"), 8)
    found, _ = workers2.run(losses_of, dict(zero(3), device="cpu"), str(tmp_path / "zero3"), 4)
    assert found == pytest.approx(expected, rel=1e-3)
