"""Optimizers that look at whole matrices under DeepSpeed's ZeRO, whose engine gives them ranges of flat tensors."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from flextrain.testing import WorkerGroup

from ..conftest import WorkerFactory
from ..mesh.parity import EPS, compare
from .test_muon import OfMatrices

pytestmark = [pytest.mark.distributed, pytest.mark.deepspeed]

TOLERANCE = 1e-4
STAGES = (1, 2, 3)


def zero(stage: int, **options: Any) -> dict[str, Any]:
    return dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=stage, **options))


RECIPE = OfMatrices(accumulate=2, eps=EPS[torch.float32])


@pytest.mark.parametrize("stage", STAGES)
def test_trains_as_on_one_device(workers2: WorkerGroup, stage: int) -> None:
    traces = workers2.run(compare, zero(stage), "plain", RECIPE, torch.float32, tolerance=TOLERANCE)
    assert all(trace == traces[0] for trace in traces)
    assert sum(traces[0].losses[-5:]) < sum(traces[0].losses[:5])
