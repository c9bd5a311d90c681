"""Checkpoints that are written while training goes on: from page-locked memory, and as if training had waited."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flextrain import STRATEGIES, OptimWrapper
from flextrain.core.checkpoint import Checkpoint, Staging, save_checkpoint, save_in_background
from flextrain.testing import WorkerGroup

STRATEGY = {
    "DDP": dict(type="DDPStrategy"),
    "FSDP": dict(type="FSDPStrategy", wrap=["Linear"]),
}


class Wide(nn.Module):
    """67 MB, so that copies take a while."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(4)))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.layers(x).square().mean()}


def content(path: Path) -> dict[str, Tensor]:
    checkpoint = Checkpoint.open(path)
    found = {key: torch.empty(info.shape, dtype=info.dtype) for key, info in checkpoint.tensors.items()}
    checkpoint.load(found)
    return found


def both_ways(folder: Path, strategy: dict[str, Any]) -> tuple[list[str], list[bool], bool]:
    """Save at every update in both ways, train on at once; what differs, whether memory is page-locked, whether weights moved."""
    built = STRATEGIES.build({**strategy, "device": os.environ.get("FLEXTRAIN_TEST_DEVICE")}, "strategy")
    built.join()
    try:
        torch.manual_seed(0)
        model, optim = built.setup(Wide(), OptimWrapper(dict(type="AdamW", lr=1e-2)))
        assert optim is not None
        staging, different, before = Staging(), [], None
        x = torch.randn(16, 2048, device=built.device)
        pending = None
        for number in range(4):
            optim.backward(model(x)["loss"])
            optim.step()
            if pending is not None:
                pending.wait()
            save_checkpoint(folder / f"waited_{number}", built.state())
            pending = save_in_background(folder / f"background_{number}", built.state(), staging=staging)
        for _ in range(3):  # changes the weights while the last of them is written
            optim.backward(model(x)["loss"])
            optim.step()
        assert pending is not None
        pending.wait()
        for number in range(4):
            ours, theirs = (content(folder / f"{way}_{number}") for way in ("background", "waited"))
            different += [key for key in theirs if not torch.equal(ours[key], theirs[key])]
            moved = before is None or any(not torch.equal(theirs[key], before[key]) for key in theirs)
            before = theirs
        return different, [block.is_pinned() for block in staging.memory._blocks], moved
    finally:
        built.leave()


@pytest.mark.parametrize("strategy", STRATEGY)
def test_what_is_saved_in_the_background(group: WorkerGroup, kind: str, tmp_path: Path, strategy: str) -> None:
    for different, pinned, moved in group.run(both_ways, tmp_path, STRATEGY[strategy]):
        assert different == []
        assert moved
        assert pinned
        assert all(pinned) == (kind not in ("cpu", "mps"))
