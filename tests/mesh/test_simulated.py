"""flextrain verify with simulated ranks: meshes at sizes that do not fit on the machine, and one that goes wrong."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from flextrain.testing import WorkerGroup
from flextrain.verify.verify import verify

SCRIPT = """
import argparse, sys
sys.path.insert(0, {root!r})
import torch
from torch import nn
from torch.utils.data import Dataset
from flextrain import STRATEGIES, FlexibleRunner, FSDPStrategy
from tests.mesh.models import build, sample

class Perceptron(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 19), nn.Dropout(0.5), nn.Linear(19, 1))
    def forward(self, x, y):
        return {{"loss": ((self.net(x) - y) ** 2).mean()}}

@STRATEGIES.register_module()
class ForgetsOneRank(FSDPStrategy):
    "The last rank's gradients are left out of the sum."
    def run_window(self, window, step):
        if self.topology.rank < self.topology.world_size - 1:
            return super().run_window(window, step)
        taken = [{{key: value.clone() for key, value in batch.items()}} for batch in window]
        for batch in taken:
            batch["x"] *= 0
        return super().run_window(taken, step)

class Samples(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return {{key: value[index] for key, value in batch.items()}}

parser = argparse.ArgumentParser()
parser.add_argument("model")
name = parser.parse_args().model
torch.set_default_dtype(torch.float64)
if name == "perceptron":
    generator = torch.Generator().manual_seed(3)
    batch = {{"x": torch.randn(64, 6, generator=generator), "y": torch.randn(64, 1, generator=generator)}}
else:
    batch = sample(name, 64, 1)
FlexibleRunner(
    model=Perceptron if name == "perceptron" else lambda: build(name),
    train_dataloader=dict(
        batch_size=1, dataset=Samples(), collate_fn=dict(type="default_collate"), sampler=dict(type="DefaultSampler", shuffle=True)
    ),
    optim_wrapper=dict(optimizer=dict(type="AdamW", lr=3e-3), clip_grad=dict(max_norm=0.1)),
    train_cfg=dict(max_epochs=50),
).train()
"""

pytestmark = pytest.mark.distributed


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT).format(root=str(Path(__file__).parents[2])))
    return str(path)


def agree(script: str, model: str, ranks: int, strategies: list[str], group: WorkerGroup, steps: int = 3) -> None:
    """All strategies train as one device does, to rounding; the loss is averaged in float32."""
    report = verify(script, strategies, arguments=[model], processes=ranks, steps=steps, simulate=True, workers=group)
    assert report.exit_status == 0, report
    for row in report.rows:
        assert row.dtype == "float64"
        for quantity, difference in row.differences.items():
            assert difference is not None
            assert difference < (1e-6 if quantity == "loss" else 1e-11), (row.strategy, quantity, difference)


@pytest.mark.full
def test_four_simulated_ranks(script: str, workers1: WorkerGroup) -> None:
    agree(script, "plain", 4, ["mesh:dp2xtp2"], workers1, steps=2)


@pytest.mark.full
@pytest.mark.parametrize(
    "model, strategies",
    [
        ("perceptron", ["fsdp", "mesh:dp8xtp2", "mesh:dp_replicate4xdp_shard4"]),
        ("llama", ["fsdp", "mesh:dp8xtp2"]),
        ("plain", ["mesh:pp2xdp4xtp2", "mesh:cp4xdp4"]),
        ("mixtral", ["mesh:ep4xdp8xtp2"]),
    ],
)
def test_sixteen_simulated_ranks(script: str, model: str, strategies: list[str]) -> None:
    if model in ("llama", "mixtral"):
        pytest.importorskip("transformers")
    with WorkerGroup(1, timeout_s=600.0) as group:
        agree(script, model, 16, strategies, group)


@pytest.mark.full
def test_a_strategy_that_forgets_one_of_sixteen_ranks_is_named(script: str) -> None:
    with WorkerGroup(1, timeout_s=600.0) as group:
        report = verify(
            script,
            ["fsdp", "ForgetsOneRank"],
            arguments=["perceptron"],
            processes=16,
            steps=2,
            simulate=True,
            workers=group,
        )
    good, bad = report.rows
    assert (good.status, bad.status, report.exit_status) == ("same", "differs", 1)
    assert bad.first is not None
    assert (bad.first.step, bad.first.parameter) == (1, "net.0.weight")
