"""The simulated device: what the other tests here take for granted of it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.npu


def facts() -> dict[str, Any]:
    import torch_npu

    current = torch.accelerator.current_accelerator()
    return {"type": current and current.type, "count": torch.npu.device_count(), "file": torch_npu.__file__}


def test_torch_finds_it_by_itself(npu1: Any, simulated_npu: Path) -> None:
    expected = {"type": "npu", "count": 2, "file": str(simulated_npu / "torch_npu" / "__init__.py")}
    assert npu1.run(facts) == [expected]


WRONG = {
    "a model on the CPU": lambda: nn.Linear(4, 2)(torch.ones(3, 4, device="npu")),
    "data on the CPU": lambda: nn.Linear(4, 2).to("npu")(torch.ones(3, 4)),
    "targets on the CPU": lambda: nn.functional.cross_entropy(torch.ones(2, 3, device="npu"), torch.tensor([0, 1])),
    "another device": lambda: torch.ones(2, device="npu:0") + torch.ones(2, device="npu:1"),
    "numpy": lambda: torch.ones(2, device="npu").numpy(),
    "embedding": lambda: nn.Embedding(4, 2)(torch.tensor([1], device="npu")),
    "batch norm": lambda: nn.BatchNorm1d(4)(torch.ones(3, 4, device="npu")),
    "list": lambda: torch._foreach_add([torch.ones(2, device="npu")], [torch.ones(2)]),
}


def misplaced() -> dict[str, str]:
    found = {}
    for name, attempt in WRONG.items():
        try:
            attempt()
            found[name] = "nothing"
        except (RuntimeError, TypeError) as error:
            found[name] = type(error).__name__
    return found


def test_tensors_on_different_devices_do_not_mix(npu1: Any) -> None:
    (found,) = npu1.run(misplaced)
    assert found == {name: "TypeError" if name == "numpy" else "RuntimeError" for name in WRONG}


def trained(device: str) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(1)
    losses = []
    for x in torch.randn(20, 16, 4, generator=torch.Generator().manual_seed(2)):
        optimizer.zero_grad()
        loss = model(x.to(device)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss)
    return [loss.item() for loss in losses]


def both() -> tuple[list[float], list[float]]:
    return trained("npu"), trained("cpu")


def test_it_computes_what_the_cpu_computes(npu1: Any) -> None:
    ((npu, cpu),) = npu1.run(both)
    assert npu == cpu


def traffic() -> Counter[str]:
    import torch_npu

    x, y = torch.ones(3, 4, device="npu"), torch.ones(2)
    seen: list[str] = []
    torch_npu.watch(seen.append)
    try:
        (x + 1).sum().sqrt_()
        y.to("npu", non_blocking=True)
        assert not seen
        x.sum().item()
        bool(x.any())
        x.cpu()
        torch.ones(2).copy_(x[0, :2])
        y.to("npu")
        x.nonzero()
        torch.npu.synchronize()
        torch.accelerator.synchronize()
    finally:
        torch_npu.watch(None)
    return Counter(seen)


def test_it_tells_when_the_host_waits_for_it(npu1: Any) -> None:
    (seen,) = npu1.run(traffic)
    assert seen == {"item": 2, "copy to host": 2, "blocking copy to device": 1, "size": 1, "synchronize": 2}


def too_early() -> tuple[list[list[float]], list[str]]:
    import torch_npu

    source, target = torch.ones(2, device="npu"), torch.zeros(2, pin_memory=True)
    seen: list[str] = []
    torch_npu.watch(seen.append)
    try:
        target.copy_(source, non_blocking=True)
        event = torch.accelerator.current_stream().record_event()
        source.add_(1)  # comes after the copy, as on a stream
        before = target.tolist()
        event.synchronize()
    finally:
        torch_npu.watch(None)
    return [before, target.tolist()], seen


def test_a_copy_that_is_not_waited_for_has_not_arrived(npu1: Any) -> None:
    (found,) = npu1.run(too_early)
    assert found == ([[0.0, 0.0], [1.0, 1.0]], ["synchronize"])


def reduced() -> tuple[str, list[float], str]:
    import torch.distributed as dist

    from flextrain import NPUStrategy

    strategy = NPUStrategy()
    strategy.join()
    value = torch.full((2,), float(strategy.topology.rank + 1), device=strategy.device)
    dist.all_reduce(value)
    whole = torch.ones(1)
    dist.all_reduce(whole)
    backend = dist.get_backend_config()
    strategy.leave()
    return str(strategy.device), [*value.tolist(), *whole.tolist()], backend


def test_each_of_two_processes_has_a_device_and_they_talk_over_hccl(npu2: Any) -> None:
    results = npu2.run(reduced)
    assert [device for device, _, _ in results] == ["npu:0", "npu:1"]
    assert all(values == [3.0, 3.0, 2.0] for _, values, _ in results)
    assert all(backend == "cpu:gloo,npu:hccl" for _, _, backend in results)
