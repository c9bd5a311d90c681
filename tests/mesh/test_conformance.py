"""The conformance kit on meshes, also of four processes; sizes in short names; `flextrain verify` with them."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flextrain import MeshStrategy
from flextrain.core.base.errors import ConfigError
from flextrain.core.base.registry import STRATEGIES
from flextrain.strategies.build import build_strategy
from flextrain.testing import WorkerGroup, check_strategy
from flextrain.verify.verify import verify

PLAN = {"blocks.*.mlp.0": "colwise", "blocks.*.mlp.2": "rowwise"}
ARITHMETIC = ("facts", "initial_weights", "gradients", "accumulation", "clipping")


@pytest.mark.distributed
@pytest.mark.parametrize(
    "processes, options, only",
    [
        pytest.param(4, dict(tp=2), ARITHMETIC, id="dp2xtp2-arithmetic", marks=pytest.mark.full),
        pytest.param(2, dict(tp=2), None, id="tp2", marks=pytest.mark.full),
        pytest.param(4, dict(tp=2), None, id="dp2xtp2", marks=pytest.mark.full),
        pytest.param(4, dict(tp=4), None, id="tp4", marks=pytest.mark.full),
        pytest.param(4, dict(dp_replicate=2), None, id="hsdp", marks=pytest.mark.full),
        pytest.param(2, dict(pp=2), None, id="pp2", marks=pytest.mark.full),
    ],
)
def test_conformance(
    workers: Callable[[int], WorkerGroup], processes: int, options: dict[str, Any], only: tuple[str, ...] | None
) -> None:
    spec = dict(type="MeshStrategy", plan=PLAN, **options)
    assert check_strategy(spec, world_size=processes, workers=workers(processes), only=only).passed


SCRIPT = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 1)
    def forward(self, x, y):
        return {"loss": ((self.down(self.up(x).tanh()) - y) ** 2).mean()}

data = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
collate = lambda samples: dict(zip("xy", map(torch.stack, zip(*samples))))
cfg = dict(
    model=Model,
    strategy=dict(type="MeshStrategy", plan={"up": "colwise", "down": "rowwise"}),
    train_dataloader=dict(dataset=TensorDataset(data, data.sum(1, keepdim=True)), collate_fn=collate, batch_size=4),
    optim_wrapper=dict(type="OptimWrapper", optimizer=dict(type="AdamW", lr=0.02), clip_grad=dict(max_norm=0.1)),
    train_cfg=dict(by_epoch=True, max_epochs=4),
)
"""


@pytest.mark.distributed
def test_verify_with_sizes(tmp_path: Path, workers2: WorkerGroup) -> None:
    """A strategy of the script's class has the script's plan."""
    script = tmp_path / "training.py"
    script.write_text(textwrap.dedent(SCRIPT))
    report = verify(str(script), ["mesh:tp2", "mesh:dp2"], processes=2, steps=5, workers=workers2)
    assert [row.status for row in report.rows] == ["same", "same"], str(report)
    with pytest.raises(ConfigError, match='strategies: "mesh:tq2" has "tq", choose dp, dp_replicate'):
        verify(str(script), ["mesh:tq2"], processes=2, steps=5, workers=workers2)


@pytest.mark.parametrize(
    "name, sizes",
    [
        ("mesh", {}),
        ("mesh:tp2", dict(tp=2)),
        ("mesh:dp2xtp2", dict(dp_shard=2, tp=2)),
        ("mesh:dp_replicate2xep4", dict(dp_replicate=2, ep=4)),
        ("mesh:dp=2,tp=2", dict(dp_shard=2, tp=2)),
        ("mesh:dp_shard=-1,pp=2", dict(dp_shard=-1, pp=2)),
        (dict(type="mesh:tp2", plan=PLAN), dict(tp=2, plan=PLAN)),
    ],
)
def test_sizes_in_a_short_name(name: Any, sizes: dict[str, Any]) -> None:
    strategy = build_strategy(name)
    assert type(strategy) is MeshStrategy
    assert {key: getattr(strategy.config, key) for key in strategy.config.model_fields_set} == sizes
    assert STRATEGIES.expand(name, "strategy") == {"type": "MeshStrategy", **sizes}


@pytest.mark.parametrize(
    "name, message",
    [
        ("mesh:tq2", 'strategy: "mesh:tq2" has "tq", choose dp, dp_replicate, dp_shard,'),
        ("mesh:dp_shart2", 'strategy: "mesh:dp_shart2" has "dp_shart", choose dp,'),
        ("mesh:tp2xtp2", 'strategy: "mesh:tp2xtp2" has tp twice, give one size'),
        ("mesh:dp2xdp_shard2", 'strategy: "mesh:dp2xdp_shard2" has dp_shard twice, give one size'),
        ("mesh:2", 'strategy: "mesh:2" is not allowed, write axes with their sizes, such as "mesh:dp2xtp2"'),
        ("mesh:", 'strategy: "mesh:" is not allowed, write axes with their sizes, such as "mesh:dp2xtp2"'),
        ("mesh:tp=two", 'strategy: "mesh:tp=two" is not allowed, write axes with their sizes'),
        ("mesh:tp=2xpp=2", 'strategy: "mesh:tp=2xpp=2" is not allowed, write axes with their sizes'),
        ("mesh:tp=2,", 'strategy: "mesh:tp=2," is not allowed, write axes with their sizes'),
        ("mesh:tp=2,tq=2", 'strategy: "mesh:tp=2,tq=2" has "tq", choose dp, dp_replicate, dp_shard,'),
        ("mesh:tp=2,tp=2", 'strategy: "mesh:tp=2,tp=2" has tp twice, give one size'),
        ("mesh:tp=-2", 'strategy: "mesh:tp=-2" is not allowed, write axes with their sizes'),
        (dict(type="mesh:tp2", tp=4), 'strategy.tp: 4 disagrees with type "mesh:tp2", give one of them'),
        ("ddp:tp2", 'strategy.type: "ddp:tp2" cannot be imported'),
    ],
)
def test_refused_short_names(name: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_strategy(name)
    assert str(caught.value).startswith(message)
