"""The device itself: it is chosen, computes, draws, remembers, and carries messages."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from flextrain import SingleDeviceStrategy
from flextrain.core.comm import collectives as dist
from flextrain.core.device.device import HostBuffer, memory_mb, synchronize, to_device
from flextrain.core.device.precision import autocast_computes_in
from flextrain.core.random.generators import load_rng_state, rng_state, set_seed
from flextrain.testing import WorkerGroup


@pytest.fixture
def device() -> Any:
    strategy = SingleDeviceStrategy(device=os.environ.get("FLEXTRAIN_TEST_DEVICE"))
    strategy.join()
    yield strategy.device
    strategy.leave()


def test_it_is_chosen(device: torch.device, kind: str) -> None:
    assert device.type == kind
    if kind != "cpu":
        assert torch.accelerator.current_device_index() == device.index == 0


def test_it_computes_what_the_cpu_computes(device: torch.device) -> None:
    a, b = (torch.randn(200, 300, generator=torch.Generator().manual_seed(i)) for i in range(2))
    torch.testing.assert_close((a.to(device) @ b.to(device).T).cpu(), a @ b.T, rtol=1e-4, atol=1e-4)


def test_batches_come_to_it(device: torch.device) -> None:
    batch = {"x": torch.arange(1000.0), "more": [torch.ones(3), ("text", torch.zeros(2, dtype=torch.long))]}
    if device.type != "cpu":
        batch["pinned"] = torch.arange(10_000_000.0).pin_memory()
    moved = to_device(batch, device)
    assert moved["x"].device == moved["more"][1][1].device == device
    back = to_device(moved, torch.device("cpu"))
    assert all(torch.equal(back[key], batch[key]) for key in batch if key != "more")


def test_its_random_numbers_are_resumed(device: torch.device) -> None:
    set_seed(3)
    state, first = rng_state(device), torch.rand(5, device=device).tolist()
    torch.rand(100, device=device)
    load_rng_state(state, device)
    assert torch.rand(5, device=device).tolist() == first


def test_its_memory_is_counted(device: torch.device) -> None:
    held = torch.ones(64 * 2**18, device=device)  # 64 MiB
    synchronize(device)
    assert memory_mb(device) >= held.nbytes / 2**20


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_computes_in(device: torch.device, dtype: torch.dtype) -> None:
    if not autocast_computes_in(device.type, dtype):
        pytest.skip(f"{device.type} does not compute in {dtype}")
    with torch.autocast(device.type, dtype):
        assert torch.nn.Linear(8, 8).to(device)(torch.ones(2, 8, device=device)).dtype is dtype


def messages(alone: bool) -> list[Any]:
    strategy = SingleDeviceStrategy() if alone else None
    if strategy is None:
        from flextrain import DDPStrategy

        strategy = DDPStrategy(timeout_s=60)
    strategy.join()
    if alone:
        strategy._join_alone()
    try:
        size, device = dist.get_world_size(), strategy.device
        mine, host = torch.full((3,), float(strategy.topology.rank + 1), device=device), torch.ones(2)
        torch.distributed.all_reduce(mine)
        torch.distributed.all_reduce(host)
        many = [
            torch.full((2,), float(strategy.topology.rank), device=device),
            torch.full((2,), float(strategy.topology.rank)),
        ]
        dist.broadcast_tensors(many)
        dist.barrier()
        total = sum(range(1, size + 1))
        right = mine.tolist() == [total] * 3 and host.tolist() == [size] * 2 and all(not t.any() for t in many)
        return [str(device), right, dist.all_gather_object(strategy.topology.rank)]
    finally:
        strategy.leave()


def test_processes_talk(group: WorkerGroup, processes: int, kind: str) -> None:
    for _ in range(2):  # a group that was left can be formed again
        for rank, (device, right, everyone) in enumerate(group.run(messages, processes == 1)):
            assert device == (kind if kind in ("cpu", "mps") else f"{kind}:{rank}")
            assert right
            assert everyone == list(range(processes))


@pytest.mark.accelerator
def test_copies_to_the_host_wait_for_nobody(device: torch.device) -> None:
    buffer = HostBuffer()
    for _ in range(3):
        large, host = torch.ones(2**26, device=device), torch.ones(5)  # 256 MiB
        crosswise = torch.arange(12.0, device=device).view(3, 4).T
        copies = buffer.copy([large, crosswise, host])
        large.zero_()
        crosswise.zero_()
        buffer.wait()
        assert bool((copies[0] == 1).all())
        assert copies[1].tolist() == torch.arange(12.0).view(3, 4).T.tolist()
        assert copies[2].tolist() == [1.0] * 5
    assert all(block.is_pinned() for block in buffer._blocks)


@pytest.mark.cuda
def test_this_machine(tmp_path: Path) -> None:
    """Fails never: what it prints is for the report."""
    for i in range(torch.cuda.device_count()):
        print(torch.cuda.get_device_properties(i))
