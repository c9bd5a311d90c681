"""Mistakes that one of several processes makes: every process is told, and none waits."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from flextrain import FlexibleRunner
from flextrain.core.base.errors import FlexTrainError
from flextrain.testing import WorkerGroup

from .mistakes.parts import Frozen, Net, OldState, good

pytestmark = pytest.mark.distributed


def told(folder: Path, mistake: str) -> str:
    """What this process is told; rank 1 alone makes the mistake, unless both do."""
    is_second = os.environ["RANK"] == "1"
    config: dict[str, Any] = good(folder)
    config["strategy"] = dict(type="DDPStrategy", device="cpu")
    if mistake == "state":
        config["custom_hooks"] = [OldState({1, 2} if is_second else [1, 2])]
    if mistake == "frozen":
        config["model"] = Frozen
    if mistake == "classes" and is_second:
        config["model"] = lambda: Net(3)
    runner = None
    try:
        runner = FlexibleRunner(**config)
        runner.train()
    except FlexTrainError as error:
        return str(error)
    finally:
        if runner is not None:
            runner.strategy.leave()
    return "nothing"


@pytest.mark.parametrize(
    "mistake, says",
    [("state", "hook.OldState/seen"), ("frozen", "model: Frozen has nothing to train"), ("classes", "model")],
)
def test_every_process_is_told(workers2: WorkerGroup, tmp_path: Path, mistake: str, says: str) -> None:
    for line in workers2.run(told, tmp_path, mistake):
        assert says in line
        assert "\n" not in line
