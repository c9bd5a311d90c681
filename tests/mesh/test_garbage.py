"""An update frees what it does not need at once; nothing waits for Python to look for reference cycles."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from flextrain import MeshStrategy
from flextrain.core.comm import collectives as dist
from flextrain.runner.loops.step import Stepper
from flextrain.testing import WorkerGroup

from ..device import DEVICE
from .models import MATRICES as PLAN
from .models import build
from .parity import RECIPES, data, dtype_of, started

pytestmark = pytest.mark.distributed

MESH = dict(type="MeshStrategy")
CASES = [
    pytest.param(dict(MESH, pp=2), "plain", id="pp2"),
    pytest.param(dict(MESH, tp=2, plan=PLAN, tp_kind="local"), "plain", id="tp2-local"),
    pytest.param(dict(MESH, tp=2, plan=PLAN), "plain", id="tp2", marks=pytest.mark.full),
    pytest.param(dict(MESH, pp=2, pp_schedule="zero_bubble"), "llama", id="zero_bubble", marks=pytest.mark.full),
    pytest.param(dict(MESH, cp=2), "plain", id="cp2", marks=pytest.mark.full),
    pytest.param(dict(MESH, dp_shard=2, ep=2), "mixtral", id="ep2", marks=pytest.mark.full),
]


def in_cycles(spec: dict[str, Any], model: str) -> list[tuple[int, ...]]:
    """In a worker: the shapes of the tensors that an update leaves in reference cycles."""
    recipe = RECIPES["accumulate-clip"]
    with dtype_of(torch.float32), started(spec, model, recipe) as session:
        session.model.train()
        stepper = Stepper(session.strategy, session.model, session.optim)
        *before, last = data(model, recipe, 3)
        for window in before:
            stepper.train(list(window))
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            stepper.train(list(last))
            gc.collect()
            return [tuple(found.shape) for found in gc.garbage if isinstance(found, Tensor)]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()


@pytest.mark.parametrize("spec, model", CASES)
def test_no_tensor_is_in_a_cycle(workers2: WorkerGroup, spec: dict[str, Any], model: str) -> None:
    assert workers2.run(in_cycles, spec, model) == [[], []]


def layers_left(wrap: str | None) -> int:
    """In a worker: how many layers of a model exist after a pipeline has cut it."""
    strategy = MeshStrategy(device=DEVICE, pp=2, wrap=wrap)
    try:
        strategy.join()
        model: Any = build("plain")
        layers = [weakref.ref(layer) for layer in model.layers]
        strategy.setup(model, RECIPES["adamw"].optim())
        gc.collect()
        return sum(layer() is not None for layer in layers)
    finally:
        strategy.leave()
        dist.destroy_process_group()


@pytest.mark.parametrize("wrap", [None, "blocks"])
def test_layers_of_other_stages_are_freed(workers2: WorkerGroup, wrap: str | None) -> None:
    assert workers2.run(layers_left, wrap) == [1, 1]
