"""The functions that run in one iteration are those that CONTRIBUTING.md lists."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import flextrain.core
from flextrain import BaseModel, FlexibleRunner, Hook

ROOT = Path(flextrain.core.__file__).resolve().parents[1]
PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"


class Profile(Hook):
    """Notes the library's functions from one update's first hook to the next one's."""

    priority = "HIGHEST"

    def __init__(self) -> None:
        self.seen: dict[str, dict[str, None]] = defaultdict(dict)

    def before_train_iter(self, runner: FlexibleRunner, batch_idx: int, data_batch: Any = None) -> None:
        if batch_idx in (3, 4):
            sys.setprofile(self.note if batch_idx == 3 else None)

    def note(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and "<" not in (code.co_name[0], code.co_filename[0]):
            path = Path(code.co_filename).resolve()
            parts = path.relative_to(ROOT).parts if path.is_relative_to(ROOT) else ("tests",)
            if parts[0] != "tests" and not parts[0].startswith(".venv"):
                self.seen[path.relative_to(ROOT).as_posix()][code.co_name] = None


class Net(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor, y: Tensor, mode: str = "tensor") -> dict[str, Tensor]:
        return {"loss": nn.functional.mse_loss(self.head(x), y)}


def test_the_list_is_that_of_an_iteration_on_one_device(tmp_path: Path) -> None:
    profile = Profile()
    FlexibleRunner(
        model=Net,
        work_dir=tmp_path,
        train_dataloader=DataLoader(TensorDataset(torch.randn(24, 4), torch.randn(24, 2)), batch_size=4),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
        train_cfg=dict(max_epochs=1),
        custom_hooks=[profile],
    ).train()
    block = PAGE.read_text().partition("## One iteration\n")[2].partition("\n## ")[0]
    listed = {path: names.split(", ") for path, names in re.findall(r"^    (\S+\.py): (.+)$", block, re.MULTILINE)}
    found = {path: sorted(names) for path, names in profile.seen.items()}
    assert {path: sorted(names) for path, names in listed.items()} == found, "\n".join(
        f"    {path}: {', '.join(names)}" for path, names in profile.seen.items()
    )
