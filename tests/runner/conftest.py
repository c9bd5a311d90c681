"""A stand-in for the runner, for tests of single hooks and of reporting."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flextrain.runner.reporting import LogProcessor, MessageHub, Reporter, close_logger, setup_logger


class RecordingReporter(Reporter):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[Any, ...]] = []

    def on_start(self, config: Any) -> None:
        self.events.append(("start", config))

    def on_scalars(self, scalars: Any, step: int, mode: str) -> None:
        self.events.append((mode, step, dict(scalars)))

    def close(self) -> None:
        self.events.append(("close",))


def make_runner(folder: Path, **changes: Any) -> Any:
    """What hooks may use of a runner, without a model, data, or loops."""
    wrapper = SimpleNamespace(param_groups=[{"lr": 1e-3}], last_step=SimpleNamespace(skipped=False), accumulate=1)
    wrapper.wrappers, wrapper.refresh = {"": wrapper}, lambda: None
    fields: dict[str, Any] = {
        "epoch": 0,
        "iter": 0,
        "max_epochs": 2,
        "max_iters": 20,
        "train_loop": SimpleNamespace(by_epoch=True, epoch_length=10, max_iters=20, stop_training=False, start_iter=0),
        "val_loop": SimpleNamespace(num_batches=4),
        "test_loop": SimpleNamespace(num_batches=4),
        "train_dataloader": SimpleNamespace(batch_size=8, sampler=None, batch_sampler=None, dataset=[]),
        "strategy": SimpleNamespace(device=torch.device("cpu"), data_shard=(0, 1)),
        "optim_wrapper": wrapper,
        "param_schedulers": [],
        "message_hub": MessageHub(),
        "log_processor": LogProcessor(),
        "reporters": [RecordingReporter()],
        "accumulate": 1,
        "work_dir": str(folder),
        "log_dir": str(folder / "20240703_130417"),
        "timestamp": "20240703_130417",
        "experiment_name": "digits",
        "cfg": {"max_epochs": 2},
        "rank": 0,
        "world_size": 1,
    }
    runner = SimpleNamespace(**{**fields, **changes})
    runner.log_file = Path(runner.log_dir) / f"{runner.timestamp}.log"
    runner.logger = setup_logger("INFO", runner.log_file, runner.rank)
    runner.lines = lambda: [line.partition(" - INFO - ")[2] for line in runner.log_file.read_text().splitlines()]
    return runner


@pytest.fixture
def new_runner(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """``new_runner(**changes)`` is a stand-in for the runner."""
    yield lambda **changes: make_runner(tmp_path, **changes)
    close_logger()


@pytest.fixture
def runner(new_runner: Callable[..., Any]) -> Any:
    return new_runner()
