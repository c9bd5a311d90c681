"""A forward that writes to parameters: refused, since the write would be lost, or would make processes differ."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flextrain import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, MeshStrategy, OptimWrapper, SingleDeviceStrategy
from flextrain.core.base.errors import StrategyError
from flextrain.core.comm import collectives as dist
from flextrain.testing import WorkerGroup
from flextrain.testing.loop import train

pytestmark = pytest.mark.distributed


class Follows(nn.Module):
    """A second network follows the first one, or a scalar and a buffer count."""

    steps: Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.calls = kind, 0
        self.table = nn.Embedding(6, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.target = copy.deepcopy(self.blocks[0]).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(()), requires_grad=False)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        if self.kind == "data":
            for own, other in zip(self.target.parameters(), self.blocks[0].parameters(), strict=True):
                own.data = own.data * 0.9 + other.detach().mean() * 0.1
        if self.kind == "another order":
            with torch.no_grad():
                self.target.weight.copy_(self.target.weight.flip(0, 1))
        if self.kind == "in place":
            with torch.no_grad():
                self.target.weight.mul_(0.9)
        if self.kind == "nothing at first":
            with torch.no_grad():
                self.target.weight.lerp_(self.blocks[0].weight, 0.5)
        if self.kind == "later" and self.calls == 2:
            with torch.no_grad():
                self.target.weight.mul_(0.9)
        if self.kind == "trained":
            with torch.no_grad():
                self.blocks[0].weight.clamp_(min=-0.01)
        self.calls += 1
        with torch.no_grad():
            self.steps += 1
            if self.kind == "none":
                self.scale += 1
        hidden = self.table(x)
        for block in self.blocks:
            hidden = block(hidden)
        return {"loss": (hidden - self.target(hidden).detach()).pow(2).mean()}


WRITES = {
    "data": "target.weight",
    "in place": "target.weight",
    "another order": "target.weight",
    "nothing at first": "target.weight",
    "later": "target.weight",
    "trained": "blocks.0.weight",
    "none": "",
}
COUNTED = {kind: name for kind, name in WRITES.items() if "data" not in kind}


def raised(make: Callable[[str], Any], kinds: Collection[str]) -> dict[str, str]:
    """In a worker: what is raised for each model, in its later updates too."""
    found = {}
    for kind in kinds:
        strategy = make(kind)
        strategy.join()
        torch.manual_seed(0)
        model, optim = strategy.setup(Follows(kind), OptimWrapper(dict(type="SGD", lr=0.1)))
        found[kind] = ""
        try:
            train(strategy, model, optim, [[dict(x=torch.arange(6))]] * 3)  # type: ignore[arg-type]
        except StrategyError as error:
            found[kind] = str(error)
        strategy.leave()
        if dist.is_initialized():
            dist.destroy_process_group()
    return found


def check(found: dict[str, str], writes: Mapping[str, str], why: str) -> None:
    expected = {
        kind: f"model.{name}: forward writes to it, which would be lost, since {why}" if name else ""
        for kind, name in writes.items()
    }
    assert {kind: text[: len(expected[kind])] for kind, text in found.items()} == expected
    assert not found.get("none")


def fsdp(kind: str) -> Any:
    return FSDPStrategy(device="cpu", wrap=["Linear"] if kind == "none" else None)


def compiled(kind: str) -> Any:
    return FSDPStrategy(device="cpu", compile=dict(backend="eager"))


def zero1(kind: str) -> Any:
    return DeepSpeedStrategy(device="cpu", zero_optimization=dict(stage=1))


def zero3(kind: str) -> Any:
    return DeepSpeedStrategy(device="cpu", zero_optimization=dict(stage=3))


def half(kind: str) -> Any:
    return DeepSpeedStrategy(device="cpu", zero_optimization=dict(stage=0), bf16=dict(enabled=True))


def test_writes_in_forward(workers1: WorkerGroup) -> None:
    check(workers1.run(raised, fsdp, [*WRITES])[0], WRITES, "FSDP has gathered")


def test_writes_in_a_compiled_forward(workers1: WorkerGroup) -> None:
    kinds = {kind: COUNTED[kind] for kind in ("nothing at first", "trained")}
    check(workers1.run(raised, compiled, [*kinds])[0], kinds, "FSDP has gathered")


def test_writes_to_what_an_engine_has_elsewhere(workers1: WorkerGroup) -> None:
    trained = {kind: WRITES[kind] if kind == "trained" else "" for kind in ("later", "trained")}
    check(workers1.run(raised, zero1, [*trained])[0], trained, "the engine updates a copy")
    shards = {kind: COUNTED[kind] for kind in ("nothing at first", "later", "trained")}
    check(workers1.run(raised, zero3, [*shards])[0], shards, "the engine keeps its values in shards")


def test_writes_to_what_masters_round_to(workers1: WorkerGroup) -> None:
    kinds = {kind: WRITES[kind] for kind in ("in place", "data", "trained")}
    check(workers1.run(raised, half, [*kinds])[0], kinds, "the engine updates a copy")


class Bounded(nn.Module):
    """A table whose rows are far from their bound at first."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(6, 4, max_norm=1000.0)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.table(x).mean()}


BOUNDED: dict[str, tuple[type, dict[str, Any]]] = {
    "ddp": (DDPStrategy, {}),
    "fsdp": (FSDPStrategy, {}),
    "mesh": (MeshStrategy, dict(dp_shard=2)),
    "zero1": (DeepSpeedStrategy, dict(zero_optimization=dict(stage=1))),
    "zero3": (DeepSpeedStrategy, dict(zero_optimization=dict(stage=3))),
}


def bounded(kind: str) -> str:
    """In a worker: what a strategy says at set-up of a table that keeps its norms."""
    make, options = BOUNDED[kind]
    strategy: Any = make(device="cpu", **options)
    strategy.join()
    try:
        strategy.setup(Bounded(), OptimWrapper(dict(type="SGD", lr=0.1)))
    except StrategyError as error:
        return str(error)
    finally:
        strategy.leave()
    return ""


@pytest.mark.parametrize("kind", BOUNDED)
def test_a_table_that_keeps_its_norms(workers2: WorkerGroup, kind: str) -> None:
    found = workers2.run(bounded, kind)
    assert [text.partition(", by")[0] for text in found] == ["model.table: has max_norm=1000.0"] * 2


@contextlib.contextmanager
def recorded_warnings() -> Iterator[list[str]]:
    lines: list[str] = []
    handler, logger = logging.Handler(logging.WARNING), logging.getLogger("flextrain")
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


class Renormed(nn.Module):
    """A table whose rows forward bounds, where samples look at them; or that forward only reads."""

    def __init__(self, bound: float | None) -> None:
        super().__init__()
        self.table, self.bound = nn.Parameter(torch.ones(6, 4)), bound

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.embedding(x, self.table, max_norm=self.bound).sum(-1).tanh().mean()}


def told(bound: float | None) -> tuple[list[str], bool]:
    """In a worker: the warnings under DDP, and whether hooks are left."""
    strategy = DDPStrategy(device="cpu")
    strategy.join()
    torch.manual_seed(0)
    model, optim = strategy.setup(Renormed(bound), OptimWrapper(dict(type="SGD", lr=0.1)))
    with recorded_warnings() as lines:
        train(strategy, model, optim, [[dict(x=torch.arange(6))]] * 3)  # type: ignore[arg-type]
    left = bool(strategy.module._forward_hooks or strategy.module._forward_pre_hooks)
    strategy.leave()
    return lines, left


@pytest.mark.parametrize("bound", [1.0, None])
def test_writes_that_samples_decide_on_are_told(workers2: WorkerGroup, bound: float | None) -> None:
    for lines, left in workers2.run(told, bound):
        assert [line.split(", if")[0].split(";")[0] for line in lines] == (
            ["model.table: forward writes to it, on every process by samples of its own"] if bound else []
        )
        assert not left


def told_at_setup(by_frequency: bool) -> list[str]:
    """In a worker: the warnings of DDP at set-up."""
    strategy = DDPStrategy(device="cpu")
    strategy.join()
    with recorded_warnings() as lines:
        strategy.setup(nn.Embedding(4, 2, scale_grad_by_freq=by_frequency), OptimWrapper(dict(type="SGD", lr=0.1)))
    strategy.leave()
    return lines


@pytest.mark.parametrize("by_frequency", [True, False])
def test_gradients_that_count_words_are_told(workers2: WorkerGroup, by_frequency: bool) -> None:
    for lines in workers2.run(told_at_setup, by_frequency):
        assert len(lines) == by_frequency
        assert all(
            "has scale_grad_by_freq=True, which counts words in the samples of each process" in line for line in lines
        )


class Counts(nn.Module):
    """Divides by a buffer that it counts up before, in place or by assignment."""

    count: Tensor

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.layer, self.norm, self.in_place = nn.Linear(4, 4), nn.BatchNorm1d(4), in_place
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        if self.in_place:
            self.count += 1
        else:
            self.count = self.count + 1
        return {"loss": (self.norm(self.layer(x)).tanh() / (1 + self.count)).square().mean()}


@pytest.mark.processes  # torch 2.6 starts the compiler for it
@pytest.mark.parametrize("in_place", [True, False])
def test_a_compiled_module_that_writes_to_its_buffers_is_told(in_place: bool) -> None:
    torch.compiler.reset()
    strategy = SingleDeviceStrategy(device="cpu", compile=dict(backend="aot_eager"))
    torch.manual_seed(0)
    model, optim = strategy.setup(Counts(in_place), OptimWrapper(dict(type="SGD", lr=0.1)))
    with recorded_warnings() as lines:
        train(strategy, model, optim, [[dict(x=torch.randn(3, 4))]] * 3)  # type: ignore[arg-type]
    told = "strategy.compile: forward of Counts writes to its buffer count in place"
    assert [line.split(";")[0] for line in lines] == ([told] if in_place else [])
    strategy.leave()
    torch.compiler.reset()
