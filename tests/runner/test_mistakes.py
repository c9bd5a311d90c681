"""Mistakes of meaning: each is met with one line that names the key, what was given, and what to do.

They are beside those of test_bad_input.py, which are mistakes of spelling and type. The rows are in the folder mistakes/.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flextrain import CheckpointError, ConfigError, FlexibleRunner
from flextrain.core.base.errors import FlexTrainError
from flextrain.testing import WorkerGroup

from .mistakes import checkpoints, data, environment, hooks, metrics, models, schedules
from .mistakes.parts import Frozen, Net, OldState, Row, changed, good

KINDS = (schedules, data, models, metrics, hooks, environment, checkpoints)
ROWS = [row for kind in KINDS for row in kind.ROWS]


class Heard(logging.Handler):
    """Warnings and errors of the log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def heard() -> Iterator[list[str]]:
    handler, logger = Heard(), logging.getLogger("flextrain")
    logger.addHandler(handler)
    yield handler.lines
    logger.removeHandler(handler)


def test_the_good_configuration_is_good(tmp_path: Path, heard: list[str]) -> None:
    FlexibleRunner(**good(tmp_path)).train()
    assert heard == []


def test_there_are_enough_rows() -> None:
    assert len(ROWS) >= 150
    assert [name for name, count in Counter(row.name for row in ROWS).items() if count > 1] == []


def attempt(row: Row, folder: Path) -> Exception | None:
    """Make the runner and call it; return the error that ended it."""
    config = good(folder / "run")
    runner = None
    try:
        changed(config, row.changes)
        runner = FlexibleRunner(**config)
        row.do(runner)
    except Exception as error:
        return error
    finally:
        if runner is not None:
            runner.strategy.leave()
    return None


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_mistake(row: Row, tmp_path: Path, heard: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in row.env.items():
        monkeypatch.setenv(name, value)
    if row.prepare is not None:
        row.prepare(tmp_path / "run")
        heard.clear()
    error = attempt(row, tmp_path)
    if row.hears == "error":
        assert isinstance(error, FlexTrainError), f"{type(error).__name__}: {error}, and heard {heard}"
        assert "\n" not in str(error)
        assert row.says in str(error)
        assert row.late or not any(re.search(r"after epoch \d+, iteration [1-9]", line) for line in heard), heard
    elif row.hears == "warning":
        assert error is None, f"{type(error).__name__}: {error}"
        assert len([line for line in heard if row.says in line and "\n" not in line]) == 1, heard
    else:
        assert error is not None, "nothing was raised"
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        assert len([line for line in heard if reason in line and row.says in line]) == 1, [reason, *heard]


def test_every_run_hears_that_its_loss_is_averaged(tmp_path: Path, heard: list[str]) -> None:
    row = next(row for row in ROWS if row.name == 'reduction="none"')
    for number in ("first", "second"):
        heard.clear()
        assert attempt(row, tmp_path / number) is None
        assert len([line for line in heard if row.says in line]) == 1, heard


def test_a_full_disk_is_known_before_training(
    tmp_path: Path, heard: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=16))
    runner = FlexibleRunner(**good(tmp_path))
    with pytest.raises(
        CheckpointError, match=r"has 16 bytes free, and a checkpoint takes [\d.]+ (bytes|KiB) or more; make room"
    ):
        runner.train()
    assert runner.iter == 0
    FlexibleRunner(**{**good(tmp_path), "default_hooks": dict(checkpoint=None)}).train()


@pytest.mark.full
def test_a_compiled_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="^model: is compiled already, give the model itself, and compile=True$"):
        FlexibleRunner(**{**good(tmp_path), "model": torch.compile(Net())}).train()


# Of one of several processes


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


@pytest.mark.distributed
@pytest.mark.parametrize(
    "mistake, says",
    [("state", "hook.OldState/seen"), ("frozen", "model: Frozen has nothing to train"), ("classes", "model")],
)
def test_every_process_is_told(workers2: WorkerGroup, tmp_path: Path, mistake: str, says: str) -> None:
    for line in workers2.run(told, tmp_path, mistake):
        assert says in line
        assert "\n" not in line
