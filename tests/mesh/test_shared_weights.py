"""A weight that two modules have stays one where the model is built without memory, and no axis divides it."""

from typing import Any

import pytest
from torch import nn

from flextrain.testing import WorkerGroup

from . import models
from .models import Plain
from .parity import RECIPES, compare


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
