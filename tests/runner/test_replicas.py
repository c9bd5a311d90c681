"""Runs whose processes drift apart: their checkpoints are refused, and what may differ is rank 0's."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flextrain import DivergenceError
from flextrain.core.base.tensors import replica_of
from flextrain.core.checkpoint import Checkpoint, is_checkpoint
from flextrain.runner.hooks import Hook
from flextrain.strategies.parts import replicas
from flextrain.testing import WorkerGroup

from .training import Net, SaveEvery, make_runner

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("quick")]


# A bit that flips in the memory of one process


def flip(tensor: Tensor, bit: int) -> None:
    """Turn one bit of a tensor the other way round, as a fault of the memory does: torch does not hear of it."""
    memory = tensor.view(-1).view(torch.uint8).numpy()
    memory[bit // 8] ^= 1 << bit % 8


class Wide(Net):
    """With a weight beyond the size up to which all of it was always compared."""

    def __init__(self) -> None:
        super().__init__(width=12_000)
        self.register_buffer("mask", torch.arange(5))


def flipped(folder: str, strategy: dict[str, Any], count: int) -> list[tuple[str, int, str]]:
    """Flip bits one after the other, each before a save: the tensor, the rank, and what the save said."""
    runner = make_runner(
        folder,
        model=Wide,
        strategy=strategy,
        optim_wrapper=dict(optimizer=dict(type="AdamW", lr=0.01)),
        train_cfg=dict(by_epoch=False, max_iters=2),
    )
    runner.train()
    runner.save_checkpoint(folder, "before")
    weights, optimizer = replicas(runner.strategy)
    held = {key: found[0] for key, tensor in {**weights, **optimizer}.items() if (found := replica_of(tensor))}
    # By address, because ZeRO has one counter of updates for all parameters of a group.
    first = {held[key].data_ptr(): key for key in reversed(held)}
    held = {key: held[key] for key in first.values()}
    held["mask"] = runner.strategy.module.mask
    chance, results = random.Random(4), []
    for number in range(count):
        key, rank, at = chance.choice(sorted(held)), chance.randrange(runner.world_size), chance.random()
        bit = int(at * 8 * held[key].numel() * held[key].itemsize)
        if runner.rank == rank:
            flip(held[key], bit)
        try:
            runner.save_checkpoint(folder, f"after_{number}", async_save=number % 2 == 0)
            said = "nothing"
        except DivergenceError as error:
            said = str(error)
        if runner.rank == rank:
            flip(held[key], bit)
        results.append((key, rank, said))
    runner.save_checkpoint(folder, "last")  # all bits are as they were
    runner.strategy.leave()
    return results


@pytest.mark.parametrize(
    "strategy, kinds",
    [
        pytest.param(dict(type="DDPStrategy"), {"model", "optim"}, id="ddp"),
        pytest.param(
            dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=2)),
            {"module"},
            id="zero2",
            marks=pytest.mark.deepspeed,
        ),
    ],
)
def test_every_flipped_bit_is_found_before_the_next_save(
    workers3: WorkerGroup, tmp_path: Path, strategy: dict[str, Any], kinds: set[str]
) -> None:
    for results in workers3.run(flipped, str(tmp_path), strategy, 20):
        assert len({key for key, _, _ in results}) > 4
        assert {key.partition(".")[0] for key, _, _ in results} >= kinds
        for key, rank, said in results:
            others = ", ".join(str(other) for other in range(3) if other != rank)
            assert said.startswith(f"replicas differ: rank {rank} differs from ranks {others} in {key}"), (key, rank)
    assert sorted(path.name for path in tmp_path.iterdir() if is_checkpoint(path)) == ["before", "last"]


class FlipAt(Hook):
    """Flips a bit on rank 1 after an update."""

    priority = "HIGHEST"

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        if (runner.iter, runner.rank) == (2, 1):
            flip(runner.strategy.module.net[3].bias.detach(), 0)


def found_between_saves(folder: str) -> tuple[int, str]:
    """The update after which the hook finds a flipped bit, and what it says."""
    runner = make_runner(
        folder, strategy="DDPStrategy", custom_hooks=[FlipAt(), dict(type="CheckReplicasHook", interval=2)]
    )
    try:
        runner.train()
    except DivergenceError as error:
        return runner.iter + 1, str(error)
    finally:
        runner.strategy.leave()
    return 0, ""


def test_a_hook_compares_between_saves(workers2: WorkerGroup, tmp_path: Path) -> None:
    for iteration, said in workers2.run(found_between_saves, str(tmp_path)):
        assert iteration == 4
        assert said.startswith("replicas differ: rank 0 and rank 1 differ in model.net.3.")


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
    runner.strategy.leave()
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
