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


@pytest.mark.accelerator
def test_a_save_that_waits_copies_in_slices(tmp_path: Path, kind: str) -> None:
    """Tensors of more than a buffer, of less, and with lazy signs, in two buffers of 64 MiB."""
    table = torch.randn(2**12, 2**13, generator=torch.Generator().manual_seed(1))  # 128 MiB
    lazy = torch.view_as_complex(table[:64].view(64, -1, 2)).to(kind).conj()
    state = {
        "table": table.to(kind),
        "columns": table.to(kind)[:, :100],
        "lazy": lazy,
        "none": torch.empty(0, device=kind),
    }
    state |= {f"small.{n}": torch.full((3,), float(n), device=kind) for n in range(100)}
    written = content(save_checkpoint(tmp_path / "saved", state))
    assert [key for key, tensor in state.items() if not torch.equal(written[key], tensor.cpu().resolve_conj())] == []


def held(folder: Path) -> tuple[bool, float]:
    """Whether the device still had work when a save in the background had begun, and what was saved."""
    built = STRATEGIES.build(dict(type="DDPStrategy", device="cuda"), "strategy")
    built.join()
    try:
        staging = Staging()
        weights = torch.zeros(2**22, device=built.device)
        save_in_background(folder / "first", {"weights": weights}, staging=staging).wait()  # makes plan and memory
        torch.cuda._sleep(4_000_000_000)
        weights.add_(1)
        over = torch.cuda.current_stream().record_event()
        pending = save_in_background(folder / "second", {"weights": weights}, staging=staging)
        was_busy = not over.query()
        weights.add_(1)
        pending.wait()
        return was_busy, float(content(folder / "second")["weights"].mean())
    finally:
        built.leave()


@pytest.mark.cuda
def test_a_save_in_the_background_does_not_hold_the_host(group: WorkerGroup, tmp_path: Path) -> None:
    """Also where replicas are compared, whose hashes the device computes."""
    assert set(group.run(held, tmp_path)) == {(True, 1.0)}
