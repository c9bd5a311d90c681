"""The comparison of the first batch, and a window of a pipeline, beside hooks that fail, and that look at the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from flextrain.core.torch_compat.dtensor_private import is_gathered
from flextrain.runner.loops.step import Stepper
from flextrain.strategies.mesh.first_batch import differentiated, trying
from flextrain.strategies.parts import explain
from flextrain.testing import WorkerGroup
from flextrain.testing.loop import shard, train

from ..device import DEVICE
from .models import MATRICES, sample
from .parity import RECIPES, data, started

pytestmark = pytest.mark.distributed

RECIPE = RECIPES["adamw-clip"]
HALF = dict(mixed_precision=dict(param_dtype="bfloat16"))  # FSDP's also where nothing is sharded
SPECS: dict[str, dict[str, Any]] = {
    "cp": dict(cp=2),
    "tp": dict(tp=2, plan=MATRICES, tp_kind="local", **HALF),
    "pp": dict(pp=2, **HALF),
}


def spec_of(axis: str) -> dict[str, Any]:
    return dict(type="MeshStrategy", wrap="blocks", **SPECS[axis])


def losses_after(axis: str, where: str) -> tuple[list[float], str | None]:
    """In a worker: of a run, and what is said of an error with which a hook ends the first comparison before it."""
    with started(spec_of(axis), "plain", RECIPE) as session:
        strategy, advice = session.strategy, None
        if where != "nowhere":

            def fail(*_: Any) -> None:
                raise ZeroDivisionError

            def end(module: nn.Module, args: Any, output: Tensor) -> None:
                if where == "forward":
                    fail()
                if output.requires_grad:
                    output.register_hook(fail)  # type: ignore[no-untyped-call]

            handle = session.model.layers[0].register_forward_hook(end)  # type: ignore[union-attr, index]
            batch = shard(sample("plain", 8, 0), *strategy.topology.shard)
            with pytest.raises(ZeroDivisionError) as caught:
                Stepper(strategy, session.model, session.optim).check([batch])
            advice = explain(strategy, caught.value)
            handle.remove()
            assert all(isinstance(parameter, DTensor) for parameter in strategy.module.parameters())
        return train(strategy, session.model, session.optim, data("plain", RECIPE, 2)).losses, advice


@pytest.mark.parametrize(
    "axis, where",
    [("cp", "backward"), ("tp", "backward"), pytest.param("cp", "forward", marks=pytest.mark.full)],
)
def test_an_error_in_the_comparison_is_the_users(workers2: WorkerGroup, axis: str, where: str) -> None:
    usual = workers2.run(losses_after, axis, "nowhere")
    for (losses, advice), (expected, _) in zip(workers2.run(losses_after, axis, where), usual, strict=True):
        assert advice is None
        assert losses == expected


def losses_while_looking(axis: str, looks: bool) -> list[float]:
    """In a worker: of a run in which hooks ask for the module, in comparisons, forward and backward."""
    with started(spec_of(axis), "plain", RECIPE) as session:
        units = [module for module in session.model.modules() if isinstance(module, FSDPModule)]

        def look(*_: Any) -> None:
            before = [is_gathered(unit) for unit in units]  # type: ignore[arg-type]
            assert any(before)
            assert session.strategy.module is not None
            assert [is_gathered(unit) for unit in units] == before  # type: ignore[arg-type]

        def look_in_backward(module: nn.Module, args: Any, output: Tensor) -> None:
            look()
            if output.requires_grad:
                output.register_hook(look)  # type: ignore[no-untyped-call]

        for layer in session.model.layers if looks else ():  # type: ignore[union-attr]
            layer.register_forward_hook(look_in_backward)
        return train(session.strategy, session.model, session.optim, data("plain", RECIPE, 2)).losses


@pytest.mark.parametrize("axis", ["cp", "tp", pytest.param("pp", marks=pytest.mark.full)])
def test_the_module_may_be_asked_for_at_any_time(workers2: WorkerGroup, axis: str) -> None:
    assert workers2.run(losses_while_looking, axis, True) == workers2.run(losses_while_looking, axis, False)


def own_part_of_gradients() -> list[list[list[float]]]:
    """In a worker: what is compared of a divided parameter whose gradient is whole, or a pending sum."""
    mesh, found = init_device_mesh(DEVICE, (2,)), []
    for layout in (Replicate(), Partial()):
        layer = nn.Linear(1, 2, bias=False)
        layer.weight = nn.Parameter(distribute_tensor(torch.zeros(2, 1, device=DEVICE), mesh, [Shard(0)]))
        layer.weight.grad = DTensor.from_local(torch.tensor([[1.0], [2.0]], device=DEVICE), mesh, [layout])
        found.append(differentiated(layer, torch.zeros((), device=DEVICE))["weight"].tolist())
    return found


def test_gradients_are_compared_in_the_layout_of_their_parameters(workers2: WorkerGroup) -> None:
    """DTensors leave them in any layout, which depends on shapes."""
    assert workers2.run(own_part_of_gradients) == [[[[1.0]], [[2.0]]], [[[2.0]], [[4.0]]]]


def test_float32_has_all_its_digits_in_a_trial() -> None:
    before = torch.backends.cudnn.allow_tf32
    with trying(nn.Linear(1, 1)):
        assert not torch.backends.cudnn.allow_tf32
    assert torch.backends.cudnn.allow_tf32 == before
