"""Scripts that the tests write job files for."""

from __future__ import annotations

from pathlib import Path

import pytest

SCRIPT = """\
import argparse

from torch import nn, rand
from torch.utils.data import TensorDataset

from flextrain import FlexibleRunner


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, x, y):
        return {"loss": (self.layer(x) - y).square().mean()}


parser = argparse.ArgumentParser()
parser.add_argument("--work-dir", default="/runs/digits")
parser.add_argument("--note", default="")
given = parser.parse_args()
x = rand(32, 8)
FlexibleRunner(
    model=Net,
    train_dataloader=dict(dataset=TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, collate_fn="default_collate"),
    optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
    train_cfg=dict(max_epochs=2),
    default_hooks=dict(logger=dict(interval=2), checkpoint=CHECKPOINT),
    work_dir=given.work_dir,
    experiment_name=given.note or None,
    resume=RESUME,
    strategy=STRATEGY,
    env_cfg=ENV_CFG,
).train()
"""


class Scripts:
    """Writes scripts to a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(
        self,
        *,
        resume: str = "True",
        strategy: str = "None",
        env_cfg: str = "{}",
        checkpoint: str = "{}",
        name: str = "train.py",
    ) -> str:
        text = SCRIPT.replace("RESUME", resume).replace("STRATEGY", strategy).replace("CHECKPOINT", checkpoint)
        (self.folder / name).write_text(text.replace("ENV_CFG", env_cfg))
        return name


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scripts:
    """In the folder in which the test runs."""
    monkeypatch.chdir(tmp_path)
    return Scripts(tmp_path)
