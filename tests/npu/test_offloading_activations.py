"""Activations wait on the host of the simulated device, and no copy makes the host wait."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.npu


def compared(how: dict[str, Any]) -> tuple[list[float], list[str], int]:
    import torch_npu

    from flextrain import SingleDeviceStrategy
    from flextrain.strategies import offloading
    from tests.strategies.test_selective import SIZE, Layers

    offloading.LEAST = 64
    copies: list[bool] = []
    make = offloading.on_host

    def on_host(like: torch.Tensor, pinned: bool) -> torch.Tensor:
        made = make(like, pinned)
        copies.append(made.is_pinned())
        return made

    offloading.on_host = on_host
    torch.manual_seed(0)
    plain = Layers()
    found, seen = [], list[str]()
    for options in (None, how):
        strategy = SingleDeviceStrategy(device="npu", activation_checkpointing=options)
        model, _ = strategy.setup(copy.deepcopy(plain))
        x = torch.arange(2.0 * 8 * SIZE).sin().reshape(2, 8, SIZE).to("npu")
        torch_npu.watch(seen.append if options else None)
        try:
            model(x).backward()
        finally:
            torch_npu.watch(None)
        found.append([p.grad.cpu() for p in model.parameters()])
    offloading.on_host = make
    apart = [float((a - b).abs().max()) for a, b in zip(*found, strict=True)]
    return apart, seen, sum(copies)


@pytest.mark.parametrize(
    "how",
    [dict(offload=True), dict(offload=True, recompute=False), dict(offload=True, policy="matmuls")],
    ids=["inputs", "all", "products"],
)
def test_gradients_are_those_without(npu1: Any, how: dict[str, Any]) -> None:
    ((apart, seen, copies),) = npu1.run(compared, how)
    assert max(apart) == 0.0
    assert not seen
    assert copies >= 4
