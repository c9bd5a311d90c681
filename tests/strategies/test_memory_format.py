"""Models in channels_last under strategies that shard parameters: trained as on one device, and the log says so."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from flextrain import OptimWrapper
from flextrain.testing import WorkerGroup
from flextrain.testing.loop import train
from flextrain.testing.models import ConvNet
from flextrain.testing.sessions import single_device, started


class ChannelsLast(ConvNet):
    def __init__(self) -> None:
        super().__init__()
        self.to(memory_format=torch.channels_last)


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def losses(session: Any) -> list[float]:
    windows = [[ChannelsLast.sample(8, seed=n)] for n in range(3)]
    return train(session.strategy, session.model, session.optim, windows).losses


def sgd() -> OptimWrapper:
    return OptimWrapper(dict(type="SGD", lr=0.05))


def trains_in_channels_last(strategy: dict[str, Any]) -> list[str]:
    heard = Heard()
    logger = logging.getLogger("flextrain")
    logger.addHandler(heard)
    try:
        with started(strategy, sgd(), ChannelsLast) as session:
            found = losses(session)
        with single_device(sgd(), ChannelsLast) as session:
            assert found == pytest.approx(losses(session), rel=1e-5)
    finally:
        logger.removeHandler(heard)
    return [line for line in heard.lines if "memory_format" in line]


@pytest.mark.distributed
@pytest.mark.parametrize(
    "strategy",
    [
        dict(type="FSDPStrategy"),
        dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=3)),
        pytest.param(dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=2)), marks=pytest.mark.full),
    ],
    ids=["fsdp", "zero3", "zero2"],
)
def test_channels_last_is_made_contiguous(workers2: WorkerGroup, strategy: dict[str, Any]) -> None:
    for lines in workers2.run(trains_in_channels_last, strategy):
        assert len(lines) == 1
        assert lines[0].startswith("model.")
