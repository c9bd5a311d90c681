"""Mixed precision through the runner: float16 with loss scaling, and bfloat16."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from flextrain.core.device.precision import autocast_computes_in

from .runs import ADAMW, losses, make_runner

STRATEGIES = {
    "single": dict(type="SingleDeviceStrategy"),
    "DDP": dict(type="DDPStrategy"),
    "FSDP": dict(type="FSDPStrategy", wrap=["Sequential"]),
    "ZeRO-2": dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=2)),
}


def amp(dtype: str, **more: Any) -> dict[str, Any]:
    return dict(type="AmpOptimWrapper", dtype=dtype, optimizer=ADAMW, clip_grad=dict(max_norm=1.0), **more)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_losses_stay_near_those_of_float32(tmp_path: Path, kind: str, strategy: str, dtype: str) -> None:
    if strategy == "ZeRO-2" and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    if strategy == "ZeRO-2" and kind == "cpu" and dtype == "float16":
        pytest.skip("DeepSpeed computes in float16 on accelerators only")
    if not autocast_computes_in(kind, getattr(torch, dtype)):
        pytest.skip(f"{kind} does not compute in {dtype}")
    recipe: dict[str, Any] = dict(strategy=STRATEGIES[strategy], epochs=2)
    expected = losses(
        tmp_path / "float32", kind, optim_wrapper=dict(optimizer=ADAMW, clip_grad=dict(max_norm=1.0)), **recipe
    )
    # Large scales are halved in the first updates, which are left out: those do not count for the comparison.
    found = losses(
        tmp_path / dtype,
        kind,
        optim_wrapper=amp(dtype, **(dict(loss_scale=dict(init_scale=1024.0)) if dtype == "float16" else {})),
        **recipe,
    )
    assert len(found) == len(expected) == 16
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=0.1, atol=0.1)
    assert found[-1] < 0.7 * found[0]


def test_the_loss_scale_is_resumed(tmp_path: Path, kind: str) -> None:
    recipe = dict(optim_wrapper=amp("float16", loss_scale=dict(init_scale=256.0, growth_interval=5)))
    first = make_runner(tmp_path, kind, epochs=1, **recipe)
    first.train()
    assert first.optim_wrapper is not None
    scaled = first.optim_wrapper.plain_values()["scaler"]
    assert scaled["scale"] == 512.0
    second = make_runner(tmp_path, kind, epochs=2, resume=True, **recipe)
    second.train()
    assert second.optim_wrapper is not None
    assert second.optim_wrapper.plain_values()["scaler"]["scale"] == 2048.0
