"""Of a process's random states, those of the device that it trains on are kept, whatever else the machine has."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flextrain.core.random.generators import load_rng_state, rng_state

pytestmark = [pytest.mark.npu, pytest.mark.distributed]


def kinds_and_numbers() -> tuple[list[str], list[str], list[list[float]]]:
    second = torch.device("npu", 1)
    torch.npu.manual_seed_all(3)
    state, drawn = rng_state(second), torch.rand(2, device=second)
    torch.rand(5, device="npu:0")
    load_rng_state(state, second)
    return list(rng_state(torch.device("cpu"))), list(state), [drawn.tolist(), torch.rand(2, device=second).tolist()]


def test_those_of_the_device_at_hand(npu1: Any) -> None:
    ((on_cpu, on_npu, (drawn, again)),) = npu1.run(kinds_and_numbers)
    assert on_cpu == ["python", "numpy", "torch"]
    assert on_npu == [*on_cpu, "npu"]
    assert drawn == again
