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

from ..runner.training import log_lines
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


def looked_at() -> list[list[str]]:
    """In a worker: the warnings before and after code beside the model looks at its parameters or its state, twice."""
    found = []
    for look in (lambda model: [*model.parameters()], lambda model: model.state_dict()):
        with (
            log_lines() as lines,
            started(dict(type="MeshStrategy", pp=2), "plain", RECIPES["adamw-clip"]) as session,
        ):
            windows_of(session, sample("plain", 4, 0))
            found.append(list(lines))
            look(session.strategy.module)
            look(session.strategy.module)
            found.append([line for line in lines if line not in found[-1]])
    return found


@pytest.mark.distributed
def test_who_looks_at_a_stage_as_at_the_model_is_warned_once(workers2: WorkerGroup) -> None:
    for before, by_parameters, also_before, by_state in workers2.run(looked_at):
        assert not any("those of this process's stages only" in line for line in (*before, *also_before))
        for lines in (by_parameters, by_state):
            (line,) = lines
            assert "test_pipeline_logs.py:" in line
            assert "those of this process's stages only" in line
