"""A project that keeps MMEngine on the simulated device: its data preprocessor moves batches there, under every strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ..mmengine.conftest import _mmengine  # noqa: F401 - a fixture
from ..mmengine.digits import configuration, journal_of, train

pytestmark = [pytest.mark.npu, pytest.mark.distributed]


def train_there(folder: str, strategy: dict[str, Any]) -> tuple[list[float], list[str]]:
    """The losses, and the types of device: of the labels, of the preprocessor and of its buffers."""
    from mmengine.hooks import Hook

    from flextrain.mmengine import FlexibleRunner

    devices: list[str] = []

    class Look(Hook):
        def before_train(self, runner: Any) -> None:
            preprocessor = runner.strategy.module.data_preprocessor
            batch = preprocessor(next(iter(runner.train_dataloader)))
            devices.extend(
                tensor.device.type for tensor in (batch["inputs"], batch["data_samples"][0].gt_label, preprocessor.mean)
            )
            devices.append(preprocessor.device.type)

    cfg = configuration(folder, strategy=strategy)
    cfg.train_dataloader.batch_size = 8
    cfg.custom_hooks.append(dict(type=Look))
    runner = FlexibleRunner.from_cfg(cfg)
    runner.train()
    losses = journal_of(runner).losses
    runner.strategy.leave()
    return losses, devices


@pytest.mark.full
@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(dict(type="NPUStrategy"), id="npu"),
        pytest.param(dict(type="FSDPStrategy", device="npu", wrap=["Block"]), id="fsdp"),
        pytest.param(
            dict(type="DeepSpeedStrategy", device="npu", zero_optimization=dict(stage=3)),
            id="zero3",
            marks=[pytest.mark.deepspeed, pytest.mark.full],
        ),
    ],
)
def test_data_lands_on_the_device(tmp_path: Path, npu2: Any, strategy: dict[str, Any]) -> None:
    expected, _, _ = train(str(tmp_path / "cpu"), 16)
    (first, devices), (second, _) = npu2.run(train_there, str(tmp_path / "npu"), strategy)
    assert devices == ["npu"] * 4
    mean = [(a + b) / 2 for a, b in zip(first, second, strict=True)]
    assert mean == pytest.approx(expected, abs=1e-4)
