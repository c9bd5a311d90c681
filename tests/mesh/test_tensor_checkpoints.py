"""Checkpoints of tensor parallelism: saved under one layout and resumed under another, with the optimizer."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from flextrain.testing import WorkerGroup
from flextrain.testing.differences import same_tensors
from flextrain.testing.loop import alone, train
from flextrain.testing.sessions import load, save, whole_model

from .models import sample
from .parity import RECIPES, data, dtype_of, reference, started
from .test_tensor import CONTIGUOUS, FUSED

pytestmark = pytest.mark.distributed

PACKED = dict(type="MeshStrategy", tp=2, plan=FUSED)
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": dict(type="SingleDeviceStrategy"),
    "fsdp": dict(type="FSDPStrategy"),
    "contiguous": {**PACKED, "plan": {**FUSED, **CONTIGUOUS}},
    "packed": dict(PACKED, wrap="blocks", tp_kind="dtensor"),
    "mixed": dict(PACKED, wrap="blocks", plan_example=partial(sample, "fused", 2, 0)),
    "deferred": dict(PACKED, wrap="blocks"),
}


def trained(name: str, resumes: bool, folder: Path) -> None:
    """In a worker: the first or the second two of four updates, compared with one device."""
    recipe = RECIPES["adamw-clip"]
    _, weights = reference("fused", recipe, 4 if resumes else 2, torch.float64)
    updates = data("fused", recipe, 4)
    with dtype_of(torch.float64), started(LAYOUTS[name], "fused", recipe, deferred=name == "deferred") as session:
        if resumes:
            load(session, folder / "saved")
        train(session.strategy, session.model, session.optim, updates[2:] if resumes else updates[:2])
        if not resumes:
            save(session, folder / "saved")
        found = whole_model(session.strategy)
    same_tensors(found, weights, "final weights", 1e-12)


def resumed(first: str, second: str, folder: Path) -> None:
    """In a worker: a checkpoint of one layout resumed in another."""
    torch.set_num_threads(1)
    for name, resumes in ((first, False), (second, True)):
        if name != "one":
            trained(name, resumes, folder)
        elif os.environ["RANK"] == "0":  # outside of a strategy there is no process group
            with alone():
                trained(name, resumes, folder)


def _pairs() -> list[Any]:
    of_two = [("one", "packed"), ("packed", "one"), ("packed", "fsdp"), ("fsdp", "packed"), ("packed", "contiguous")]
    of_two += [("mixed", "packed"), ("packed", "mixed"), ("mixed", "one")]
    of_two += [("contiguous", "packed"), ("deferred", "packed"), ("packed", "deferred")]
    of_four = [("one", "packed"), ("packed", "one"), ("packed", "fsdp"), ("fsdp", "deferred"), ("contiguous", "packed")]
    found = [(2, *pair) for pair in of_two] + [(4, *pair) for pair in of_four]
    quick = [(2, "packed", "one"), (2, "mixed", "packed")]
    return [pytest.param(*each, marks=[] if each in quick else pytest.mark.full) for each in found]


@pytest.mark.parametrize("world_size, first, second", _pairs())
def test_resumed_in_another_layout(
    workers: Callable[[int], WorkerGroup], tmp_path: Path, world_size: int, first: str, second: str
) -> None:
    workers(world_size).run(resumed, first, second, tmp_path)
