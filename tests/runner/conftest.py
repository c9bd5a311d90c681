"""A stand-in for the runner, for tests of single hooks and of reporting; and a small real one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flextrain import BaseMetric, BaseModel, FlexibleRunner
from flextrain.core.comm.topology import Topology
from flextrain.runner.reporting import LogProcessor, MessageHub, Reporter, Visualizer, close_logger, setup_logger


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
    wrapper = SimpleNamespace(
        param_groups=[{"lr": 1e-3}], last_step=SimpleNamespace(skipped=False), has_updated=True, accumulate=1
    )
    wrapper.wrappers, wrapper.refresh = {"": wrapper}, lambda: None
    fields: dict[str, Any] = {
        "epoch": 0,
        "iter": 0,
        "max_epochs": 2,
        "max_iters": 20,
        "train_loop": SimpleNamespace(
            by_epoch=True, epoch_length=10, inner=0, max_iters=20, stop_training=False, start_iter=0
        ),
        "val_loop": SimpleNamespace(num_batches=4, dataloader=range(4)),
        "test_loop": SimpleNamespace(num_batches=4, dataloader=range(4)),
        "train_dataloader": SimpleNamespace(batch_size=8, sampler=None, batch_sampler=None, dataset=[]),
        "val_dataloader": None,
        "test_dataloader": None,
        "strategy": SimpleNamespace(
            device=torch.device("cpu"), topology=Topology(), module=nn.Module(), model_state=dict[str, Tensor]
        ),
        "hooks": [],
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
        "options": SimpleNamespace(resume_options=None, load_from=None),
        "resumed_from": None,
        "finish_saving": lambda wait=True: True,
        "was_marked": lambda path: False,
        "has_saved": lambda path: False,
        "save_failed": lambda path: False,
        "saving_s": 0.0,
    }
    runner = SimpleNamespace(**{**fields, **changes})
    runner.checkpoint_dir = folder
    runner.visualizer = Visualizer(vis_backends=runner.reporters, json_lines=False)
    runner.visualizer.belong_to_run(
        runner.experiment_name, folder / "vis_data", {"max_epochs": 2}, reports=runner.rank == 0
    )
    runner.strategy.parameters = lambda: runner.strategy.module.named_parameters()
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


class Tiny(BaseModel):
    """A linear classifier with a running statistic."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.linear = nn.Linear(4, 2)

    def forward(self, inputs: Tensor, targets: Tensor, mode: str = "tensor") -> Any:
        logits = self.linear(self.norm(inputs))
        return {"loss": nn.functional.cross_entropy(logits, targets)} if mode == "loss" else (logits, targets)


class Scores(BaseMetric):
    """Gives the next of the prepared values of ``accuracy`` at each validation."""

    def __init__(self, values: list[float] | None = None) -> None:
        super().__init__()
        self.values = iter(values or [0.5] * 100)

    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results.append(len(data_samples[0]))

    def compute_metrics(self, results: list[Any]) -> dict[str, Any]:
        return {"accuracy": next(self.values)}


def make_run(folder: Path, scores: list[float] | None = None, **changes: Any) -> FlexibleRunner:
    """A real runner on 40 samples: 10 iterations per epoch, 3 epochs, validation after each."""
    torch.manual_seed(0)
    data = [(torch.randn(4), i % 2) for i in range(40)]
    loader = {
        "batch_size": 4,
        "dataset": data,
        "sampler": {"type": "DefaultSampler", "shuffle": True},
        "collate_fn": {"type": "default_collate"},
    }
    options: dict[str, Any] = {
        "model": Tiny,
        "work_dir": folder,
        "train_dataloader": loader,
        "optim_wrapper": {"optimizer": {"type": "SGD", "lr": 0.1, "momentum": 0.9}},
        "train_cfg": {"by_epoch": True, "max_epochs": 3},
        "val_dataloader": {**loader, "sampler": {"type": "DefaultSampler", "shuffle": False}},
        "val_cfg": {},
        "val_evaluator": Scores(scores),
        "randomness": {"seed": 0},
        "default_hooks": {"checkpoint": None},
    }
    return FlexibleRunner(**{**options, **changes})


@pytest.fixture
def new_run(tmp_path: Path, quick: None) -> Iterator[Callable[..., FlexibleRunner]]:
    """``new_run(**changes)`` is a real runner of a tiny model; its arguments take those of FlexibleRunner's place."""
    runs: list[FlexibleRunner] = []

    def make(folder: Path = tmp_path / "work", **changes: Any) -> FlexibleRunner:
        runs.append(make_run(folder, **changes))
        return runs[-1]

    yield make
    for run in runs:
        run.strategy.leave()
    close_logger()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One thread, which tiny models are faster with, and checkpoints that do not wait for the disk."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    yield
    torch.set_num_threads(threads)
    close_logger()
