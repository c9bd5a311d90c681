"""Values to log under a pipeline, which the last stage computes and every process returns."""

from __future__ import annotations

import logging
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from flextrain.runner.loops.step import Stepper
from flextrain.testing import WorkerGroup
from flextrain.testing.loop import shard

from .models import MODELS, Plain, sample
from .parity import RECIPES, started


class Tells(Plain):
    """Returns an accuracy if the batch asks for it, and a value of its own at each third call."""

    calls = 0

    def forward(self, input_ids: Tensor, labels: Any = None, asks: Tensor | None = None) -> Any:
        found = super().forward(input_ids, labels)
        assert isinstance(found, dict)
        self.calls += 1
        if asks is not None:
            found["accuracy"] = asks.float().mean()
        if self.calls == 1:
            found["early"] = torch.ones(())
        if self.calls == 3:
            found["late"] = torch.ones(())
        return found


def told() -> tuple[list[dict[str, float]], list[str]]:
    """In a worker: what four windows return, and the lines about it."""
    lines: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("flextrain")
    logger.addHandler(handler)
    plain = sample("plain", 4, 0)
    asking = {**plain, "asks": torch.ones(4)}
    try:
        with (
            patch.dict(MODELS, tells=Tells),
            started(dict(type="MeshStrategy", pp=2), "tells", RECIPES["adamw-clip"]) as session,
        ):
            found = []
            for batch in (plain, asking, plain, asking):
                found.append(windows_of(session, shard(batch, *session.strategy.topology.shard)))
    finally:
        logger.removeHandler(handler)
    return found, lines


def windows_of(session: Any, batch: dict[str, Tensor]) -> dict[str, float]:
    outputs = Stepper(session.strategy, session.model, session.optim).train([batch])
    return {name: float(value) for name, value in outputs.items() if name not in ("loss", "grad_norm")}


@pytest.mark.distributed
def test_every_process_has_the_values_of_the_last_stage(workers2: WorkerGroup) -> None:
    (first, no_lines), (last, lines) = workers2.run(told)
    assert str(first) == str(last)  # has NaN
    assert str(first) == str([{"early": 1.0}, {"accuracy": 1.0}, {"early": float("nan")}, {"accuracy": 1.0}])
    assert no_lines == []
    assert lines == [
        "model: late, a value to log, was not there in the first window, it is left out; with strategy.pp, return it for every "
        "batch, such as 0",
        "model: early, a value to log, was there in the first window and is missing now, NaN takes its place; with strategy.pp, "
        "return it for every batch, such as 0",
    ]
