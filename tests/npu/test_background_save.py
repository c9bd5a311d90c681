"""Copies for a checkpoint that is written in the background: page-locked, made while training goes on, read when they are there."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flextrain import Hook
from flextrain.core.checkpoint import Checkpoint, Staging, save_in_background
from flextrain.core.device.device import HostBuffer

from .training import make_runner

pytestmark = [pytest.mark.npu, pytest.mark.distributed]


def state(number: int, size: int) -> dict[str, Tensor]:
    """On the device, beside one on the host and one that is not contiguous."""
    table = torch.full((size, 4), float(number), device="npu")
    return {
        "table": table,
        "columns": table[:, :2],
        "count": torch.tensor(number),
        "none": torch.empty(0, device="npu"),
    }


def saved(folder: Path) -> tuple[list[dict[str, list[float]]], list[list[tuple[str, str]]]]:
    """Three saves of changing tensors, the last of larger ones, which are changed before they are written."""
    import torch_npu

    staging, contents, seen = Staging(), [], []
    for number, size in ((1, 3), (2, 3), (3, 50)):
        waits: list[tuple[str, str]] = []
        tensors = state(number, size)
        torch_npu.watch(lambda what, to=waits: to.append((threading.current_thread().name, what)))
        try:
            pending = save_in_background(folder / f"iter_{number}", tensors, staging=staging)
            for tensor in tensors.values():
                tensor.zero_()
            path = pending.wait()
        finally:
            torch_npu.watch(None)
        checkpoint = Checkpoint.open(path)
        loaded = {key: torch.empty(info.shape, dtype=info.dtype) for key, info in checkpoint.tensors.items()}
        checkpoint.load(loaded)
        contents.append({key: value.unique().tolist() for key, value in loaded.items()})
        seen.append(waits)
    return contents, seen


@pytest.mark.full
def test_training_does_not_wait_and_what_it_changes_is_not_saved(npu1: Any, tmp_path: Path) -> None:
    ((contents, seen),) = npu1.run(saved, tmp_path)
    assert contents == [{"table": [n], "columns": [n], "count": [n], "none": []} for n in (1, 2, 3)]
    assert seen == [[("flextrain-save", "synchronize")]] * 3


def blocks(*sizes: int) -> list[tuple[int, bool]]:
    buffer = HostBuffer()
    buffer.copy([torch.ones(size, dtype=torch.uint8, device="npu") for size in sizes])
    buffer.wait()
    return [(block.numel(), block.is_pinned()) for block in buffer._blocks]


@pytest.mark.full
@pytest.mark.parametrize(
    "sizes, expected",
    [
        ((64,), [64]),
        ((1024, 512, 256), [1024, 512, 256]),  # nothing is lost
        ((64,) * 100, [4096, 2048, 256]),
        ((100,) * 3, [256, 128]),  # each takes 128
        ((700,), [1024]),
        ((64, 5000, 64), [4096, 8192]),  # the large one has to be in one
    ],
)
def test_page_locked_memory_comes_in_powers_of_two(npu1: Any, sizes: Any, expected: list[int]) -> None:
    (found,) = npu1.run(blocks, *sizes)
    assert found == [(size, True) for size in expected]


def trained_with_two_tiers(folder: Path, fast: Path) -> tuple[int, bool, list[str]]:
    """How often memory was allocated for the copies, whether all of it is page-locked, and which checkpoints were saved."""
    seen: set[tuple[int, ...]] = set()
    saved: list[str] = []

    class Looks(Hook):
        priority = "LOWEST"

        def after_train_iter(self, runner: Any, *args: Any, **kwargs: Any) -> None:
            runner.finish_saving()
            seen.add(tuple(block.data_ptr() for block in runner._checkpoints.saver._staging.memory._blocks))
            for path in (fast / f"iter_{runner.iter + 1}", folder / f"iter_{runner.iter + 1}"):
                saved.extend([f"{path.parent.name}/{path.name}"] if runner.has_saved(path) else [])

    hooks = dict(checkpoint=dict(interval=4, by_epoch=False, async_save=True, fast_dir=str(fast), fast_interval=2))
    runner = make_runner(folder, dict(type="NPUStrategy"), 1, default_hooks=hooks, custom_hooks=[Looks()])
    runner.train()
    is_pinned = all(block.is_pinned() for block in runner._checkpoints.saver._staging.memory._blocks)
    runner.strategy.leave()
    return len(seen - {()}), is_pinned, saved


@pytest.mark.full
def test_both_tiers_use_the_same_page_locked_memory(npu1: Any, tmp_path: Path) -> None:
    ((allocated, is_pinned, saved),) = npu1.run(trained_with_two_tiers, tmp_path / "run", tmp_path / "fast")
    assert saved == [f"{'fast' if done % 4 else 'run'}/iter_{done}" for done in range(2, 17, 2)]
    assert (allocated, is_pinned) == (1, True)
