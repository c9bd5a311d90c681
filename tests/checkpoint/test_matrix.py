"""Saved under one strategy on so many processes, resumed under another on so many others: the run goes on as if nothing was.

Every pair of strategies meets, with optimizers and numbers of processes that take turns; all other combinations have the
marker ``full``.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from flextrain import AmpOptimWrapper, OptimWrapper
from flextrain.testing.differences import FLOAT32_TOLERANCE, relative_difference, same_keys, same_numbers, same_tensors
from flextrain.testing.loop import train
from flextrain.testing.models import Batch, ConformanceNet
from flextrain.testing.sessions import Session, load, save, started, whole_state

from ..conftest import WorkerFactory

pytestmark = pytest.mark.distributed

DONE, MORE = 4, 3
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": dict(type="AdamW", lr=2e-3, weight_decay=0.05),
    "momentum": dict(type="SGD", lr=0.02, momentum=0.9, weight_decay=1e-3),
}
STRATEGIES: dict[str, dict[str, Any]] = {
    "single": dict(type="SingleDeviceStrategy", device="cpu"),
    "ddp": dict(type="DDPStrategy"),
    "fsdp": dict(type="FSDPStrategy", wrap=["Block"]),
    **{f"zero{n}": dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=n)) for n in (1, 2, 3)},
}


class Layout(NamedTuple):
    """A strategy of STRATEGIES on so many processes."""

    strategy: str
    processes: int

    def __str__(self) -> str:
        return f"{self.strategy}x{self.processes}"


def layouts_of(strategy: str) -> list[Layout]:
    return [Layout(strategy, n) for n in ((1,) if strategy == "single" else (1, 2, 3))]


class Everything(ConformanceNet):
    """Beside what ConformanceNet has (tied, frozen, uneven): no dimension, no element, fewer rows than processes, a counter."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.row = nn.Parameter(torch.full((1, 17), 0.1))
        self.frozen_scalar = nn.Parameter(torch.tensor(0.5), requires_grad=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("table", torch.arange(7, dtype=torch.float64))

    def logits(self, x: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            self.count += 1
        return super().logits(x) * self.temperature + self.row * self.frozen_scalar


class Decay:
    """A schedule without a memory of its own: the rate is in the optimizer, and has to come from the checkpoint."""

    def __init__(self, optim: OptimWrapper) -> None:
        self.optim = optim

    def step(self) -> None:
        for group in self.optim.param_groups:
            group["lr"] *= 0.99


@dataclass
class Saved:
    """A checkpoint, what was in it, and how the run that wrote it went on."""

    path: Path
    state: dict[str, Any]
    losses: list[float]
    end: dict[str, Any]


def batches(begin: int, end: int) -> list[list[Batch]]:
    """The global batches of the updates [begin, end), which do not depend on who trains."""
    return [[Everything.sample(12, seed=number)] for number in range(begin, end)]


def wrapper(optimizer: str) -> OptimWrapper:
    no_decay = dict(norm_decay_mult=0.0, custom_keys=dict(probe=dict(lr_mult=0.5)))
    return OptimWrapper(OPTIMIZERS[optimizer], clip_grad=dict(max_norm=0.5), paramwise_cfg=no_decay)


def updates(session: Session, begin: int, end: int) -> list[float]:
    schedules = [Decay(session.optim)]
    return train(session.strategy, session.model, session.optim, batches(begin, end), schedules).losses


def begin_and_save(strategy: dict[str, Any], optim: OptimWrapper, path: Path) -> Saved:
    with started(strategy, optim, Everything) as session:
        updates(session, 0, DONE)
        state = whole_state(session.strategy)
        save(session, path)
        losses = updates(session, DONE, DONE + MORE)
        return Saved(path, state, losses, whole_state(session.strategy))


def resume(strategy: dict[str, Any], optim: OptimWrapper, saved: Saved, tolerance: float) -> tuple[float, float]:
    """In a worker: go on from the checkpoint and hold it against the run that was not interrupted.

    Returns:
        The largest relative difference of a loss and of a weight.
    """
    with started(strategy, optim, Everything, seed=1) as session:
        load(session, saved.path)
        found = whole_state(session.strategy)
        same_keys(found, saved.state, "what was loaded")
        same_tensors(found, saved.state, "what was loaded")
        losses = updates(session, DONE, DONE + MORE)
        end = whole_state(session.strategy)
    same_numbers(losses, saved.losses, "the loss", tolerance)
    same_tensors(model(end), model(saved.end), "final weights", tolerance)
    if tolerance == 0.0:
        same_tensors(end, saved.end, "final state")
    pairs = zip(losses, saved.losses, strict=True)
    worst = max(abs(found - expected) / abs(expected) for found, expected in pairs)
    return worst, max(relative_difference(end[key], value) for key, value in model(saved.end).items())


def model(state: dict[str, Any]) -> dict[str, Tensor]:
    return {key: value for key, value in state.items() if key.startswith("model.")}


class Saves:
    """Each checkpoint is written when it is first asked for."""

    def __init__(self, folder: Path, workers: WorkerFactory) -> None:
        self.folder, self.workers = folder, workers
        self._done: dict[tuple[Layout, str], Saved] = {}

    def __call__(self, layout: Layout, optimizer: str) -> Saved:
        if (layout, optimizer) not in self._done:
            path = self.folder / f"{layout}-{optimizer}"
            strategy = STRATEGIES[layout.strategy]
            first, *others = self.workers(layout.processes).run(begin_and_save, strategy, wrapper(optimizer), path)
            for other in others:
                assert other.losses == first.losses
                same_tensors(other.end, first.end, "final state")
            self._done[layout, optimizer] = first
        return self._done[layout, optimizer]


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory, workers: WorkerFactory) -> Saves:
    return Saves(tmp_path_factory.mktemp("matrix"), workers)


def cells() -> list[Any]:
    """Every pair of strategies, on some numbers of processes; those in the ordinary run have each of them twice on both sides."""
    found = []
    for (i, a), (j, b) in itertools.product(enumerate(STRATEGIES), repeat=2):
        layouts = list(itertools.product(layouts_of(a), layouts_of(b)))
        before, after = layouts[(5 * i + j) % len(layouts)]
        optimizer = list(OPTIMIZERS)[(i + j) // 2 % 2]
        marks = [] if (j - i) % len(STRATEGIES) in (1, 3) else [pytest.mark.full]
        if "zero" in a + b:
            marks.append(pytest.mark.deepspeed)
        found.append(pytest.param(before, after, optimizer, id=f"{before}-{after}-{optimizer}", marks=marks))
    return found


@pytest.mark.parametrize("a, b, optimizer", cells())
def test_saved_under_one_resumed_under_another(
    saves: Saves, workers: WorkerFactory, record_property: Any, a: Layout, b: Layout, optimizer: str
) -> None:
    # DDP puts its buckets in another order after the first backward of a process. Gloo adds up three terms in an order that
    # depends on the place in the bucket; of two there is only one sum.
    repeatable = a == b and a != Layout("ddp", 3)
    tolerance = 0.0 if repeatable else FLOAT32_TOLERANCE
    saved = saves(a, optimizer)
    found = workers(b.processes).run(resume, STRATEGIES[b.strategy], wrapper(optimizer), saved, tolerance)
    record_property("loss", max(loss for loss, _ in found))
    record_property("weights", max(weights for _, weights in found))


BF16 = AmpOptimWrapper(OPTIMIZERS["adamw"], dtype="bfloat16")
FULL = OptimWrapper(OPTIMIZERS["adamw"])
OFFLOAD = dict(offload_optimizer=dict(device="cpu"))
MASTERS: dict[str, tuple[dict[str, Any], OptimWrapper]] = {
    "autocast": (STRATEGIES["ddp"], BF16),
    "mixed-precision": (dict(type="FSDPStrategy", mixed_precision=dict(param_dtype="bfloat16")), FULL),
    **{f"zero{n}": (STRATEGIES[f"zero{n}"], BF16) for n in (1, 2, 3)},
    "offload": (dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=2, **OFFLOAD)), FULL),
    "offload-zero2": (dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=2, **OFFLOAD)), BF16),
    "offload-zero3": (dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=3, **OFFLOAD)), BF16),
}


def load_alone(saved: Saved) -> None:
    """In a worker: the state on a single device, in float32, is bit for bit what was trained."""
    with started(STRATEGIES["single"], OptimWrapper(OPTIMIZERS["adamw"]), Everything, seed=1) as session:
        load(session, saved.path)
        same_tensors(whole_state(session.strategy), saved.state, "what was loaded")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.deepspeed] if "zero" in name or "offload" in name else [])
        for name in MASTERS
    ],
)
def test_masters_are_what_is_saved(tmp_path: Path, workers: WorkerFactory, name: str) -> None:
    strategy, optim = MASTERS[name]
    saved = workers(2).run(begin_and_save, strategy, optim, tmp_path / "a")[0]
    parameters = [value for key, value in model(saved.state).items() if value.dtype is torch.float32]
    rounded = [value for value in parameters if value.numel() > 1 and torch.equal(value.bfloat16().float(), value)]
    assert len(rounded) == 0 < len(parameters), "the digits that bfloat16 has not are there, and so the test is one"
    workers(1).run(load_alone, saved)
    workers(2).run(resume, strategy, optim, saved, 0.0)
