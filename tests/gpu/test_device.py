"""The device itself: it is chosen, computes, draws, remembers, and carries messages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flextrain import SingleDeviceStrategy
from flextrain.core.comm import collectives as dist
from flextrain.core.device.accelerator import _side_stream, can_pin, has_bfloat16, is_fused
from flextrain.core.device.device import HostBuffer, memory_mb, synchronize, to_device
from flextrain.core.device.precision import autocast_computes_in
from flextrain.core.random.generators import load_rng_state, rng_state, set_seed
from flextrain.testing import WorkerGroup

from .runs import BATCH, make_runner, spots


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


def busy(device: torch.device) -> Any:
    """Give the device's stream about a second of work; an event that is over when the work is."""
    torch.cuda._sleep(2_000_000_000)
    return torch.cuda.current_stream(device).record_event()


@pytest.mark.cuda
@pytest.mark.parametrize("pinned", [True, False], ids=["page-locked", "ordinary"])
def test_a_batch_is_copied_beside_the_work_of_the_device(device: torch.device, pinned: bool) -> None:
    """Neither the copy nor the host waits for what the device still has to do; what is computed with it does."""
    host = torch.arange(2.0**24)  # 64 MiB
    host = host.pin_memory() if pinned else host
    float(to_device(host, device).double().sum())  # makes stream and memory, and loads kernels
    synchronize(device)
    over = busy(device)
    moved = to_device(host, device)
    total = moved.double().sum()
    side = _side_stream(device)
    side.synchronize()  # the copy is there
    assert not over.query()
    assert float(total) == float(host.double().sum())


@pytest.mark.cuda
def test_memory_of_a_batch_is_not_used_again_too_early(device: torch.device) -> None:
    """Batches are let go while the work with them is still to be done: the next ones get other memory until it is."""
    hosts = [torch.full((2**22,), float(n)).pin_memory() for n in range(8)]
    synchronize(device)
    busy(device)
    sums = []
    for host in hosts:
        moved = to_device(host, device)
        sums.append(moved.mean())
        del moved
    assert torch.stack(sums).tolist() == [float(n) for n in range(8)]


SEGMENTS = """
import torch
from flextrain import SingleDeviceStrategy
SingleDeviceStrategy(device="cuda").join()
held = torch.ones(2**22, device="cuda")
print(all(segment["is_expandable"] for segment in torch.cuda.memory_snapshot()))
"""


@pytest.mark.cuda
@pytest.mark.parametrize("given, grow", [("", "True"), ("expandable_segments:False", "False")])
def test_segments_of_memory_grow_unless_the_user_says_otherwise(tmp_path: Path, given: str, grow: str) -> None:
    known = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    env = {**known, "PYTORCH_CUDA_ALLOC_CONF": given} if given else known
    command = [sys.executable, "-c", SEGMENTS]  # not here, where a part of the package is a folder of its name
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=80)
    assert done.stdout.split() == [grow], done.stderr


@pytest.mark.accelerator
def test_what_is_chosen_where_nothing_is_said(tmp_path: Path, kind: str) -> None:
    adamw = dict(type="AdamW", lr=1e-3)
    data = dict(batch_size=BATCH, dataset=spots(), collate_fn="default_collate", num_workers=1)
    runner = make_runner(
        tmp_path, kind, train_dataloader=data, optim_wrapper=dict(type="AmpOptimWrapper", optimizer=adamw)
    )
    runner.train()
    assert runner.optim_wrapper is not None
    assert runner.optim_wrapper.param_groups[0]["fused"] is is_fused("AdamW", runner.strategy.device)
    expected = torch.bfloat16 if has_bfloat16(runner.strategy.device) else torch.float16
    assert runner.strategy.precision.compute is expected
    assert runner.train_dataloader.pin_memory is can_pin(kind)
    assert sum("Chosen for" in file.read_text() for file in tmp_path.rglob("*.log")) == 1
    runner.strategy.leave()


@pytest.mark.cuda
def test_this_machine(tmp_path: Path) -> None:
    """Fails never: what it prints is for the report."""
    for i in range(torch.cuda.device_count()):
        print(torch.cuda.get_device_properties(i))
