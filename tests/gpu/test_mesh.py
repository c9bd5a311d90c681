"""MeshStrategy on the device trains as one device does, in processes that may share it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
from torch.distributed.fsdp import FSDPModule

from flextrain.strategies.mesh.pipeline.orders import SCHEDULES

from ..mesh import test_tensor
from ..mesh.models import MATRICES, MODELS, Plain
from ..mesh.parity import RECIPES, compare
from ..npu.test_mesh import CASES, MESH, drawn_beside_stages, drops_as_one_device
from .sharing import Sharing

Team = Callable[[int], Sharing]


def test_heads_drop_as_on_one_device(team: Team) -> None:
    team(2).run(drops_as_one_device, test_tensor.CHUNKED, "dropping_heads", team(2).options)


def test_positions_drop_as_on_one_device(team: Team) -> None:
    options = dict(sequence_parallel=True, **team(2).options)
    team(2).run(drops_as_one_device, MATRICES, "dropping", options)


def test_stages_draw_for_themselves(team: Team) -> None:
    """Under a pipeline beside tensor parallelism; a message to all processes would wait for ever."""
    first, *others = team(4).run(drawn_beside_stages, team(4).options)
    assert all(trace == first for trace in others)


@pytest.mark.parametrize("case", CASES)
def test_parity(team: Team, case: str) -> None:
    options, model = CASES[case]
    if case == "tp of transformers' plan":
        transformers = pytest.importorskip("transformers")
        if not hasattr(transformers.PreTrainedModel, "_resolve_parallel_plans"):
            pytest.skip("this transformers cannot say the plan of a model")
    team(2).run(compare, {**MESH, **options, **team(2).options}, model, RECIPES["accumulate-clip"])


def deep(spec: dict[str, Any]) -> None:
    """In a worker."""
    with patch.dict(MODELS, deep=functools.partial(Plain, layers=4)):
        compare(spec, "deep", RECIPES["accumulate-clip"], updates=4)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules(team: Team, schedule: str) -> None:
    if SCHEDULES[schedule].splits_backward and not hasattr(FSDPModule, "finalize_backward"):
        pytest.skip("this torch has no FSDPModule.finalize_backward, which a divided backward needs")
    team(2).run(deep, {**MESH, "pp": 2, "pp_schedule": schedule, **team(2).options})
