"""Saved under one mesh or strategy, resumed under another: the run goes on as if nothing was, optimizer included.

A new axis is one line in LAYOUTS. A few pairs are in the ordinary run, all of them have the marker ``full``.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from flextrain import MeshStrategy
from flextrain.testing.differences import same_keys, same_numbers, same_tensors
from flextrain.testing.loop import train
from flextrain.testing.sessions import Session, load, save, whole_state

from ..conftest import WorkerFactory
from .models import MATRICES, sample
from .parity import BATCH, RECIPES, dtype_of, started

pytestmark = pytest.mark.distributed

RECIPE = RECIPES["accumulate-clip"]
DONE, MORE = 4, 3
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}
EXPERTS = {"layers.*.experts": "experts"}


class Layout(NamedTuple):
    """A strategy on so many processes."""

    processes: int
    strategy: dict[str, Any]

    def of(self, model: str) -> dict[str, Any]:
        """The strategy for a model; matrices are divided, and experts too if there are some."""
        if self.strategy.get("tp", 1) > 1 and model == "mixture":
            return {"ep": 2, **self.strategy, "plan": MATRICES | EXPERTS}
        if self.strategy["type"] == "MeshStrategy":
            return {**self.strategy, "plan": MATRICES | EXPERTS if model == "mixture" else MATRICES}
        return self.strategy

    @property
    def is_deepspeed(self) -> bool:
        return self.strategy["type"] == "DeepSpeedStrategy"

    @property
    def lacking(self) -> str:
        """The axes that MeshStrategy has not."""
        there = {axis.name for axis in MeshStrategy.axes}
        return ", ".join(name for name in ("cp", "pp") if name in self.strategy and name not in there)


def mesh(processes: int, **options: Any) -> Layout:
    return Layout(processes, dict(type="MeshStrategy", **options))


LAYOUTS: dict[str, Layout] = {
    "single": Layout(1, dict(type="SingleDeviceStrategy")),
    "ddp": Layout(2, dict(type="DDPStrategy")),
    "fsdp": Layout(2, dict(type="FSDPStrategy", wrap="blocks")),
    "zero2": Layout(2, dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=2))),
    "zero3": Layout(2, dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=3))),
    "tp2": mesh(2, tp=2),
    "dp2xtp2": mesh(4, tp=2, wrap="blocks"),
    "cp2": mesh(2, cp=2),
    "ep2": mesh(2, ep=2, wrap="blocks"),
    "dp4xep2": mesh(4, ep=2),
    "pp2": mesh(2, pp=2),
    "pp2xdp2": mesh(4, pp=2),
    "dp2xtp2xpp2": mesh(8, tp=2, pp=2),
}
QUICK = {
    ("single", "dp2xtp2"),
    ("ep2", "single"),
    ("tp2", "pp2"),
    ("cp2", "pp2xdp2"),
}


@dataclass
class Saved:
    """A checkpoint, what was in it, and how the run that wrote it went on."""

    path: Path
    state: dict[str, Any]
    losses: list[float]
    end: dict[str, Any]


def updates(session: Session, begin: int, end: int) -> list[float]:
    """The losses of the updates [begin, end), of two micro-batches each."""
    windows = [[_batch(2 * number), _batch(2 * number + 1)] for number in range(begin, end)]
    return train(session.strategy, session.model, session.optim, windows).losses


def _batch(seed: int) -> dict[str, Tensor]:
    batch = sample("plain", BATCH, seed)
    positions = torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"])
    return {**batch, "position_ids": positions.contiguous()}


def begin_and_save(strategy: dict[str, Any], model: str, dtype: torch.dtype, path: Path) -> Saved:
    """In a worker."""
    torch.set_num_threads(1)
    with dtype_of(dtype), started(strategy, model, RECIPE) as session:
        updates(session, 0, DONE)
        state = whole_state(session.strategy)
        save(session, path)
        losses = updates(session, DONE, DONE + MORE)
        return Saved(path, state, losses, whole_state(session.strategy))


def resume(strategy: dict[str, Any], model: str, dtype: torch.dtype, saved: Saved) -> None:
    """In a worker: go on from the checkpoint, and hold it against the run that was not interrupted."""
    torch.set_num_threads(1)
    with dtype_of(dtype), started(strategy, model, RECIPE) as session:
        updates(session, DONE, DONE + 1)  # so that everything must come from the checkpoint
        load(session, saved.path)
        found = whole_state(session.strategy)
        same_keys(found, saved.state, "what was loaded")
        same_tensors(found, saved.state, "what was loaded")
        losses = updates(session, DONE, DONE + MORE)
        end = whole_state(session.strategy)
    same_numbers(losses, saved.losses, "the loss", TOLERANCE[dtype])
    same_tensors(end, saved.end, "the final state", TOLERANCE[dtype])


class Saves:
    """Each checkpoint is written when it is first asked for."""

    def __init__(self, folder: Path, workers: WorkerFactory) -> None:
        self.folder, self.workers = folder, workers
        self._done: dict[tuple[str, str, torch.dtype], Saved] = {}

    def __call__(self, name: str, model: str, dtype: torch.dtype) -> Saved:
        key = (name, model, dtype)
        if key not in self._done:
            layout, path = LAYOUTS[name], self.folder / f"{name}-{model}-{dtype}"
            first, *others = self.workers(layout.processes).run(begin_and_save, layout.of(model), model, dtype, path)
            assert all(other.losses == first.losses for other in others)
            self._done[key] = first
        return self._done[key]


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory, workers: WorkerFactory) -> Saves:
    return Saves(tmp_path_factory.mktemp("meshes"), workers)


def pairs() -> list[Any]:
    found = []
    for before, after in itertools.product(LAYOUTS, LAYOUTS):
        marks: list[Any] = [] if (before, after) in QUICK else [pytest.mark.full]
        if lacking := LAYOUTS[before].lacking or LAYOUTS[after].lacking:
            marks.append(pytest.mark.skip(reason=f"MeshStrategy has no axis {lacking}"))
        if LAYOUTS[before].is_deepspeed or LAYOUTS[after].is_deepspeed:
            marks.append(pytest.mark.deepspeed)
        found.append(pytest.param(before, after, id=f"{before}-{after}", marks=marks))
    return found


@pytest.mark.parametrize("before, after", pairs())
def test_saved_under_one_resumed_under_another(saves: Saves, workers: WorkerFactory, before: str, after: str) -> None:
    is_exact = not (LAYOUTS[before].is_deepspeed or LAYOUTS[after].is_deepspeed)  # DeepSpeed has no float64
    dtype = torch.float64 if is_exact else torch.float32
    model = "mixture" if any("ep" in LAYOUTS[name].strategy for name in (before, after)) else "plain"
    saved = saves(before, model, dtype)
    workers(LAYOUTS[after].processes).run(resume, LAYOUTS[after].of(model), model, dtype, saved)
