"""`flextrain train` with a project that keeps MMEngine's registries."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from flextrain.cli import main

BASE = """
train_dataloader = dict(batch_size=4, sampler=dict(type="DefaultSampler", shuffle=True), collate_fn="default_collate")
optim_wrapper = dict(optimizer=dict(type="SGD", lr=0.1))
train_cfg = dict(by_epoch=True, max_epochs=2)
"""


def test_scopes_of_mmengines_registries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "base.py").write_text(BASE)
    (tmp_path / "scoped.py").write_text(SCOPED)
    (tmp_path / "configs" / "scoped.py").write_text(
        'custom_imports = dict(imports=["scoped"])\n_base_ = "base.py"\ndefault_scope = "scoped"\n'
        'model = dict(_delete_=True, type="ScopedNet")\ntrain_dataloader = dict(dataset=dict(_delete_=True, type="ScopedPoints"))\n'
    )
    assert main(["train", "configs/scoped.py", "--work-dir", "out", "--cfg-options", "train_cfg.max_epochs=1"]) == 0
    assert (tmp_path / "out" / "epoch_1").exists()
    assert main(["config", "check", "configs/scoped.py"]) == 0
    assert "Not checked: every dict(type=...) that the project's own classes build" in capsys.readouterr().out
    assert main(["config", "check", "configs/scoped.py", "--cfg-options", "model.widht=3"]) == 1


SCOPED = """
import torch
from mmengine.model import BaseModel
from mmengine.registry import DATASETS, MODELS, Registry

NETS = Registry("model", parent=MODELS, scope="scoped", locations=["scoped"])
POINTS = Registry("dataset", parent=DATASETS, scope="scoped", locations=["scoped"])

@NETS.register_module()
class ScopedNet(BaseModel):
    def __init__(self, data_preprocessor=None):
        super().__init__(data_preprocessor)
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, x, mode="tensor"):
        return {"loss": self.layer(x).square().mean()} if mode == "loss" else self.layer(x)

@POINTS.register_module()
class ScopedPoints(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return {"x": torch.full((4,), float(index))}
"""
