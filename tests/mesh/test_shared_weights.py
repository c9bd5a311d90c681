"""A weight that two modules have stays one where the model is built without memory, and no axis divides it."""

from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from flextrain import ConfigError, MeshStrategy, OptimWrapper
from flextrain.optim import DefaultOptimWrapperConstructor
from flextrain.strategies.mesh.pipeline.pipeline_parallel import Ties
from flextrain.testing import WorkerGroup

from ..device import DEVICE
from ..runner.training import log_lines
from . import models
from .models import Plain
from .parity import RECIPES, Recipe, compare


def _layers_tied() -> nn.Module:
    model = Plain(layers=4)
    for first, second in ((0, 1), (2, 3)):  # of one stage
        model.layers[second].up.weight = model.layers[first].up.weight
    return model


def parity(spec: dict[str, Any], name: str) -> None:
    """In a worker: see ``compare``."""
    models.MODELS["layers_tied"] = _layers_tied
    compare(dict(type="MeshStrategy", **spec), name, RECIPES["accumulate-clip"], deferred=True)


MLP = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
ATTENTION = {"layers.*.[qkv]": "colwise", "layers.*.out": "rowwise"}


@pytest.mark.parametrize(
    "spec, name",
    [
        pytest.param(dict(tp=2, tp_kind="local", plan=MLP), "plain_tied", id="tp-local"),
        pytest.param(dict(tp=2, tp_kind="dtensor", plan=MLP), "plain_tied", id="tp-dtensor"),
        pytest.param(dict(tp=2, tp_kind="local", plan=ATTENTION), "layers_tied", id="tp-layers"),
        pytest.param(dict(pp=2, pp_layers=["layers"]), "layers_tied", id="pp"),
        pytest.param(dict(cp=2, cp_keys=dict(input_ids=1, labels=1), cp_positions="position_ids"), "plain_tied", id="cp"),
        pytest.param(dict(dp_replicate=2, dp_shard=1), "layers_tied", id="replicas"),
    ],
)  # fmt: skip
def test_shared_weights_stay_one_without_memory(workers2: WorkerGroup, spec: dict[str, Any], name: str) -> None:
    workers2.run(parity, spec, name)


class Rooted(OptimWrapper):
    """Changes the gradients before an update, element by element, by their values."""

    def step(self, **options: Any) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.abs().sqrt() * parameter.grad.sign()
        return super().step(**options)


class RootedRecipe(Recipe):
    def optim(self) -> OptimWrapper:
        return Rooted(dict(type="SGD", lr=0.01), accumulative_counts=2)


def rooted() -> None:
    """In a worker: see ``compare``."""
    with log_lines() as lines:
        compare(dict(type="MeshStrategy", pp=2, pp_layers=["layers"]), "plain_tied", RootedRecipe(accumulate=2))
    said = [
        line for line in lines if "Rooted.step has the parameters and gradients of this process's stages only" in line
    ]
    assert len(said) == 1, lines


def test_an_overridden_step_has_the_gradients_of_all_stages(workers2: WorkerGroup) -> None:
    workers2.run(rooted)


def added_up() -> list[list[float]]:
    """In a worker: a divided parameter's gradient that is a pending sum over this stage, added to that of another stage."""
    layer = nn.Linear(1, 2, bias=False)
    ties = Ties(layer, lambda _: ())
    mesh = init_device_mesh(DEVICE, (2,))
    layer.weight = nn.Parameter(distribute_tensor(torch.zeros(2, 1, device=DEVICE), mesh, [Shard(0)]))
    layer.weight.grad = DTensor.from_local(torch.tensor([[1.0], [2.0]], device=DEVICE), mesh, [Partial()])
    ties._shared = [(layer.weight, distributed.new_subgroups(1)[0])]
    optim = OptimWrapper(dict(type="SGD", lr=1.0))
    optim.build(layer)
    ties.add(optim)
    return layer.weight.grad.to_local().tolist()


def test_gradients_of_stages_are_added_in_the_layout_of_the_parameter(workers2: WorkerGroup) -> None:
    """Summands of one stage are nothing to add to another stage's whole."""
    assert workers2.run(added_up) == [[[2.0]], [[4.0]]]


class ByDepth(DefaultOptimWrapperConstructor):
    """Lowers the learning rate from layer to layer, beginning with the last one that has a name."""

    def add_params(self, params: list[Any], module: nn.Module, **_: Any) -> None:
        depths = {name: int(name.split(".")[1]) for name, _ in module.named_parameters() if name.startswith("layers.")}
        for name, parameter in module.named_parameters():
            scale = 0.5 ** (max(depths.values()) - depths.get(name, 0))
            params.append(dict(params=[parameter], lr=self.base_lr * scale))


OF_HEAD = dict(paramwise_cfg=dict(custom_keys=dict(head=dict(lr_mult=3.0)), bypass_duplicate=True))


def refused(name: str, options: dict[str, Any]) -> str:
    """In a worker: why the settings of a model's parameters are refused."""
    strategy = MeshStrategy(device=DEVICE, pp=2, pp_layers=["layers"])
    try:
        with pytest.raises(ConfigError) as caught:
            strategy.setup(models.MODELS[name](), OptimWrapper(dict(type="SGD", lr=0.1), **options))
        return str(caught.value)
    finally:
        strategy.leave()


@pytest.mark.parametrize(
    "name, options, parameter",
    [("plain_tied", OF_HEAD, "head.weight"), ("plain", dict(constructor=ByDepth), "embed.weight")],
)
def test_settings_that_depend_on_the_rest_of_the_model_are_refused(
    workers2: WorkerGroup, name: str, options: dict[str, Any], parameter: str
) -> None:
    for message in workers2.run(refused, name, options):
        assert message.startswith(
            f"optim_wrapper.paramwise_cfg: {parameter} has other settings in the whole model than on"
        )
