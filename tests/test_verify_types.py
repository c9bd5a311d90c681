"""flextrain verify --types: planted faults are named, and what the mesh does at thousands of processes is not."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

from flextrain import ConfigError
from flextrain.cli import main
from flextrain.core.base.errors import StrategyError
from flextrain.verify.type_rules import Axes
from flextrain.verify.types import TypeFault, TypeReport, TypeRow, verify_types

from .planning.conftest import PLANS

# A user's script, and what a developer of a mesh could have forgotten, by name.
SCRIPT = """
import argparse, sys
sys.path.insert(0, {root!r})
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset
from flextrain import FlexibleRunner
from tests.mesh.models import Plain, build, sample
from tests.planted import FAULTS

class Samples(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return {{key: value[index] for key, value in batch.items()}}

parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("--fault")
parser.add_argument("--strategy", default="{{}}")
parser.add_argument("--accumulate", type=int, default=1)
given = parser.parse_args()
model = (lambda: build(given.model))
if given.fault:
    model = FAULTS[given.fault](model) or model
batch = sample(given.model, 64, 1)
FlexibleRunner(
    model=model,
    strategy=dict(type="MeshStrategy", **eval(given.strategy)),
    train_dataloader=dict(batch_size=4, dataset=Samples(), collate_fn=dict(type="default_collate"), sampler=dict(type="DefaultSampler", shuffle=True)),
    optim_wrapper=dict(optimizer=dict(type="AdamW", lr=3e-3), clip_grad=dict(max_norm=0.1), accumulative_counts=given.accumulate),
    train_cfg=dict(max_epochs=50),
).train()
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT).format(root=str(Path(__file__).parents[1])))
    return str(path)


def typed(script: str, strategy: str, processes: int, *arguments: str) -> TypeRow:
    report = verify_types(script, [strategy], arguments=arguments, processes=processes)
    return report.rows[0]


EXPERTS = "{'plan':{'layers.*.experts':'experts'}}"
"""Options of a model that has no plan for its experts."""
