"""A model that is given as a function is never whole in any process: peak memory of two processes, measured."""

from __future__ import annotations

import resource
import sys
from typing import Any

import pytest
from torch import Tensor, nn

from flextrain import STRATEGIES, OptimWrapper
from flextrain.testing import run_distributed

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


class Large(nn.Module):
    """``layers`` blocks of 16.8 M parameters each."""

    def __init__(self, layers: int, width: int = 4096) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = block(x)
        return {"loss": x.square().mean()}


def peak_bytes(strategy: dict[str, Any], layers: int, width: int) -> int:
    """Of this process, after set-up of a model of this size."""
    built = STRATEGIES.build({**strategy, "device": "cpu"}, "strategy")
    built.join()
    with built.building():
        model = Large(layers, width)
    built.setup(model, OptimWrapper(dict(type="SGD", lr=0.1)))
    built.leave()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1024 if sys.platform != "darwin" else 1)


STRATEGIES_THAT_SHARD = [
    pytest.param(dict(type="FSDPStrategy", wrap="blocks"), id="FSDP"),
    pytest.param(
        dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=3)),
        id="ZeRO-3",
        marks=[pytest.mark.deepspeed, pytest.mark.full],
    ),
]


@pytest.mark.full
@pytest.mark.parametrize("strategy", STRATEGIES_THAT_SHARD)
def test_400_million_parameters_on_two_processes(strategy: dict[str, Any]) -> None:
    base = max(run_distributed(peak_bytes, 2, 240.0, strategy, 2, 8))
    peak = max(run_distributed(peak_bytes, 2, 240.0, strategy, 24, 4096))
    size = 4 * 24 * (4096 * 4096 + 4096)
    assert size > 4 * 400e6
    share = (peak - base) / size
    print(f"{strategy['type']}: {share:.1%} of {size / 2**30:.2f} GiB, beside {base / 2**20:.0f} MiB")
    assert share < 0.6
