"""`strategy.timeout_s` is the limit of every process group that training makes, also of meshes' and other libraries'."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flextrain.core.torch_compat.torch_private import process_groups
from flextrain.testing import WorkerGroup
from flextrain.testing.loop import train

from .parity import RECIPES, data, started

pytestmark = pytest.mark.distributed
SECONDS = 77.0


def limits(spec: dict[str, Any], name: str) -> list[float]:
    """Seconds, of each group of this process after two updates."""
    recipe = RECIPES["accumulate-clip"]
    with started(spec | dict(timeout_s=SECONDS), name, recipe) as session:
        train(session.strategy, session.model, session.optim, data(name, recipe, 2))
        backends = [group._get_backend(torch.device("cpu")) for group in process_groups()]
        return [backend.options._timeout.total_seconds() for backend in backends]


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        pytest.param(dict(type="MeshStrategy", tp=2, plan="auto"), "llama", id="tp"),
        pytest.param(dict(type="MeshStrategy", cp=2), "llama", id="cp", marks=pytest.mark.full),
        pytest.param(dict(type="MeshStrategy", dp_shard=2, ep=2), "mixtral", id="ep", marks=pytest.mark.full),
        pytest.param(dict(type="MeshStrategy", pp=2), "llama_tied", id="pp"),
        pytest.param(dict(type="FSDPStrategy", wrap="blocks"), "llama", id="fsdp"),
        pytest.param(dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=3)), "llama", id="zero3", marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_every_group_follows_the_strategy(workers2: WorkerGroup, spec: dict[str, Any], name: str) -> None:
    for found in workers2.run(limits, spec, name):
        assert len(found) > 1  # beside the default group there is that of the CPU's messages, at least
        assert set(found) == {SECONDS}
