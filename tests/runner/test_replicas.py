"""Runs whose processes drift apart: their checkpoints are refused, and what may differ is rank 0's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flextrain import CheckpointError
from flextrain.core.checkpoint import Checkpoint, is_checkpoint
from flextrain.runner.hooks import Hook
from flextrain.testing import WorkerGroup

from .training import Net, SaveEvery, make_runner

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("quick")]


class Drift(Hook):
    """Changes something on rank 1 alone, before the save after the second update."""

    priority = "LOW"

    def __init__(self, what: str) -> None:
        self.what = what

    @torch.no_grad()
    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        if runner.iter != 1 or runner.rank != 1:
            return
        parameter = runner.strategy.module.net[0].weight
        kept = runner.optim_wrapper.optimizer.state[parameter]
        {"weight": parameter, "momentum": kept["momentum_buffer"]}[self.what].view(-1)[3] += 1e-6


def drifted(folder: str, what: str, in_background: bool) -> str:
    runner = make_runner(
        folder,
        strategy="DDPStrategy",
        custom_hooks=[Drift(what)],
        default_hooks=dict(checkpoint=dict(by_epoch=False, interval=1, async_save=in_background)),
        train_cfg=dict(max_epochs=1),
    )
    try:
        runner.train()
    except CheckpointError as error:
        return str(error)
    finally:
        runner.strategy.teardown()
    return "nothing was raised"


@pytest.mark.parametrize(
    ("what", "key", "in_background"),
    [
        ("weight", "model.net.0.weight", False),
        ("weight", "model.net.0.weight", True),
        ("momentum", "optim.state.net.0.weight.momentum_buffer", False),
    ],
)
def test_a_process_that_strays_is_named(
    workers2: WorkerGroup, tmp_path: Path, what: str, key: str, in_background: bool
) -> None:
    for said in workers2.run(drifted, str(tmp_path), what, in_background):
        assert f"iter_2: could not be saved on rank 0: {key} differs between processes, rank 1 from" in said
    assert is_checkpoint(tmp_path / "iter_1")
    assert not is_checkpoint(tmp_path / "iter_2")


class Normalised(Net):
    """Its statistics follow what a process trains on."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, index: Any, x: Tensor, y: Tensor, mode: str = "tensor") -> Any:
        return super().forward(index, self.norm(x), y, mode)


def averages(folder: str) -> dict[str, Tensor]:
    """The averages of this process's buffers, after a save."""
    ema = dict(type="EMAHook", momentum=0.5, update_buffers=True)
    runner = make_runner(
        folder,
        model=Normalised,
        strategy="DDPStrategy",
        custom_hooks=[ema, SaveEvery({3})],
        train_cfg=dict(by_epoch=False, max_iters=3),
    )
    runner.train()
    state = next(hook for hook in runner.hooks if hook.holds_weights).state_dict()
    found = {key: value.clone() for key, value in state.items() if key.startswith("averaged.norm.running")}
    runner.strategy.teardown()
    return found


def test_averages_of_buffers_are_those_of_rank_0(workers2: WorkerGroup, tmp_path: Path) -> None:
    main, other = workers2.run(averages, str(tmp_path))
    assert len(main) == 2
    assert not any(torch.equal(main[key], other[key]) for key in main)  # or there would be nothing to see
    checkpoint = Checkpoint.open(tmp_path / "iter_3")
    template = {f"hook.EMAHook/{key}": torch.zeros_like(value) for key, value in main.items()}
    checkpoint.load(template)
    for key, value in main.items():
        assert torch.equal(template[f"hook.EMAHook/{key}"], value), key
