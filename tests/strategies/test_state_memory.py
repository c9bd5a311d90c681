"""The memory that a strategy says its state needs, against the tensors of a real update on two processes."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor
from torch.distributed.tensor import DTensor

from flextrain.core.checkpoint import FlatShard
from flextrain.strategies.parts import state_memory
from flextrain.testing import WorkerGroup
from flextrain.testing.loop import train

from ..mesh.parity import RECIPES, data, started

pytestmark = pytest.mark.distributed

PLAN = {"layers.*.[qkv]": "colwise", "layers.*.out": "rowwise", "layers.*.up": "colwise", "layers.*.down": "rowwise"}
RECIPE = RECIPES["accumulate-clip"]


def zero(stage: int) -> dict[str, Any]:
    return dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=stage))


SPECS: dict[str, dict[str, Any]] = {
    "ddp": dict(type="DDPStrategy"),
    "fsdp": dict(type="FSDPStrategy", wrap="blocks"),
    "zero1": zero(1),
    "zero2": zero(2),
    "zero3": zero(3),
    "mesh:tp2": dict(type="MeshStrategy", tp=2, plan=PLAN),
    "mesh:pp2": dict(type="MeshStrategy", pp=2),
}


def held(tensor: Tensor) -> int:
    tensor = tensor.to_local() if isinstance(tensor, (DTensor, FlatShard)) else tensor
    return tensor.numel() * tensor.element_size()


def held_parameter(parameter: Tensor) -> int:
    """Under ZeRO 3 a parameter is empty, and its shard is an attribute."""
    return held(getattr(parameter, "ds_tensor", parameter))


def told_and_held(name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """In a worker: (parameters, optimizer state, gradients) as told before an update, and as they are; then what is trained."""
    with started(SPECS[name], "plain", RECIPE) as session:
        strategy, model = session.strategy, session.strategy.module
        told = state_memory(strategy)
        gradients: list[int] = []
        optimizer = session.optim.optimizer
        inner = getattr(optimizer, "optimizer", optimizer)

        def look(_: Any) -> None:
            # Stage 3 keeps what it has reduced in lists by group.
            reduced = getattr(getattr(session.model, "optimizer", None), "averaged_gradients", None) or {}
            of_model = [p.grad for p in model.parameters() if p.grad is not None]
            of_groups = [each for group in reduced.values() for each in group or ()]
            gradients[:] = [sum(map(held, of_model or of_groups))]

        def look_at_masters(*_: Any) -> None:
            """Stage 2 makes what it has reduced the gradients of its flat masters."""
            if not gradients[0]:
                grads = [p.grad for group in inner.param_groups for p in group["params"] if p.grad is not None]
                gradients[:] = [sum(map(held, grads))]

        inner.register_step_pre_hook(look_at_masters)
        session.optim.register_step_pre_hook(look)
        train(strategy, session.model, session.optim, data("plain", RECIPE, 1))
        state = [value for kept in inner.state.values() for value in kept.values() if isinstance(value, Tensor)]
        own = {id(parameter) for parameter in model.parameters()}
        # Stage 3 gives the optimizer its masters during an update only.
        given = getattr(getattr(session.model, "optimizer", None), "fp32_partitioned_groups_flat", None)
        updated = given or [parameter for group in inner.param_groups for parameter in group["params"]]
        masters = [parameter for parameter in updated if id(parameter) not in own]
        tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        found = sum(map(held_parameter, tensors.values())), sum(map(held, (*state, *masters))), *gradients
        assert told == state_memory(strategy), "an update changes nothing"
    assert told.optimizer_state is not None
    return (told.parameters, told.optimizer_state, told.gradients), found


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[*([] if name in ("fsdp", "zero3") else [pytest.mark.full]),
                                  *([pytest.mark.deepspeed] if "zero" in name else [])])
        for name in SPECS
    ],
)  # fmt: skip
def test_told_as_held(workers2: WorkerGroup, name: str) -> None:
    for told, found in workers2.run(told_and_held, name):
        assert told == found
