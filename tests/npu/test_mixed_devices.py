"""Values of the host beside those of the device, where one device takes both: what a model logs, and what its layers return."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flextrain.runner.hooks.nonfinite import _watching

from .training import Classifier, make_runner

pytestmark = [pytest.mark.npu, pytest.mark.distributed]


class Weighs(Classifier):
    """Trains itself, and logs two losses, one of them a number."""

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Any]:
        loss = self(*data)["loss"]
        optim_wrapper.update_params(loss)
        return {"loss_of_classes": loss.detach() * 0, "loss_weight": 0.5}


def logged(folder: Path) -> float:
    runner = make_runner(
        folder,
        dict(type="SingleDeviceStrategy", device="npu"),
        1,
        model=Weighs,
        train_cfg=dict(by_epoch=False, max_iters=1),
    )
    try:
        runner.train()
        return float(runner.message_hub.get_scalar("train/loss").mean())
    finally:
        runner.strategy.leave()


def test_losses_of_a_step_of_ones_own(npu1: Any, tmp_path: Path) -> None:
    assert npu1.run(logged, tmp_path) == [0.5]


class Counting(nn.Module):
    """Returns how many elements it has seen, on the host, beside what it computes."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x / 0, torch.tensor(float(x.numel()))


def found() -> list[bool]:
    layer = Counting()
    with _watching(layer, False) as seen:
        layer(torch.ones(2, device="npu"))
    return [bool(finite) for _, finite in seen]


def test_the_layer_that_is_named_for_a_nan(npu1: Any) -> None:
    assert npu1.run(found) == [[False]]
