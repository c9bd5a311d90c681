"""Run: what hooks, loops, reporters and the pieces of resuming may use of a run."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from ..optim.wrapper import OptimWrapper
from ..optim.wrapper_dict import OptimWrapperDict
from ..strategies.base import Strategy
from .data.dataloaders import TrainData
from .loops.step import Stepper
from .options import FixedOptions
from .reporting.message_hub import MessageHub


class TrainingPlace(Protocol):
    """The training loop, as others see it: where training stands and how far it goes."""

    by_epoch: bool
    stop_training: bool
    """A hook sets it to end training after the epoch or iteration under way."""

    @property
    def data(self) -> TrainData:
        """The training data as windows of micro-batches."""

    @property
    def dataloader(self) -> Any:
        """What the windows are read from."""

    @property
    def start_iter(self) -> int:
        """Updates that were done when this process began."""

    @property
    def epoch(self) -> int:
        """Epochs done."""

    @property
    def iter(self) -> int:
        """Updates done."""

    @property
    def inner(self) -> int:
        """Updates done of the epoch."""

    @property
    def max_epochs(self) -> int:
        """Epochs to do."""

    @property
    def max_iters(self) -> int:
        """Updates to do."""

    @property
    def epoch_length(self) -> int:
        """Updates of the epoch under way."""

    def state_dict(self) -> dict[str, int | None]:
        """Where training stands."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue there."""


class Evaluation(Protocol):
    """The loop of validation or testing, as others see it."""

    @property
    def num_batches(self) -> int:
        """Batches of this process."""

    def run(self) -> dict[str, Any]:
        """The metrics by name."""


class Run(Protocol):
    """A run in progress. FlexibleRunner is one; a test may give a part another one.

    The parts of the runner are written against this protocol and never import the runner, so that no two modules need
    each other. Hooks that users write are given the FlexibleRunner itself, as in MMEngine.
    """

    seed: int
    late_parameters: list[str]
    """Parameters that appeared in training and were named in the log."""

    # Paths and names

    @property
    def version(self) -> str:
        """flextrain's version."""

    @property
    def cfg(self) -> dict[str, Any]:
        """What the run was given, for the record."""

    @property
    def options(self) -> FixedOptions:
        """The arguments that are plain values."""

    @property
    def experiment_name(self) -> str:
        """The name that reporters show."""

    @property
    def timestamp(self) -> str:
        """When the run began; the name of its log folder."""

    @property
    def work_dir(self) -> str:
        """The folder for logs and checkpoints."""

    @property
    def log_dir(self) -> str:
        """The folder of this run's log."""

    @property
    def checkpoint_dir(self) -> Path:
        """The folder for checkpoints."""

    # What it tells

    @property
    def logger(self) -> logging.Logger:
        """The log."""

    @property
    def message_hub(self) -> MessageHub:
        """The figures of the run."""

    @property
    def log_processor(self) -> Any:
        """The LogProcessor."""

    @property
    def reporters(self) -> Sequence[Any]:
        """The Reporters."""

    # Processes

    @property
    def strategy(self) -> Strategy:
        """How the model is spread over devices."""

    @property
    def rank(self) -> int:
        """Number of this process."""

    @property
    def world_size(self) -> int:
        """Number of processes."""

    # Counters

    @property
    def epoch(self) -> int:
        """Epochs done."""

    @property
    def iter(self) -> int:
        """Updates done."""

    @property
    def max_epochs(self) -> int:
        """Epochs to do."""

    @property
    def max_iters(self) -> int:
        """Updates to do."""

    @property
    def accumulate(self) -> int:
        """Micro-batches per update."""

    # Parts

    @property
    def model(self) -> nn.Module:
        """What is called in training."""

    @property
    def stepper(self) -> Stepper:
        """Calls the model the way it wants to be called."""

    @property
    def optim_wrapper(self) -> OptimWrapper | OptimWrapperDict | None:
        """How parameters are updated."""

    @property
    def schedulers(self) -> dict[str, list[Any]]:
        """The parameter schedulers of each optimizer, by its name."""

    @property
    def param_schedulers(self) -> Any:
        """The parameter schedulers: a list, or a dict of lists for several optimizers."""

    @property
    def train_loop(self) -> TrainingPlace:
        """The training loop."""

    @property
    def val_loop(self) -> Evaluation | None:
        """The validation loop."""

    @property
    def test_loop(self) -> Evaluation | None:
        """The test loop."""

    @property
    def train_dataloader(self) -> Any:
        """The training data."""

    # Hooks

    @property
    def hooks(self) -> Sequence[Any]:
        """The hooks in the order in which they run."""

    @property
    def hook_calls(self) -> Any:
        """The HookDispatcher."""

    def call_hook(self, fn_name: str, **kwargs: Any) -> None:
        """Run every hook at a point."""

    # Checkpoints

    def save_checkpoint(
        self,
        out_dir: str | Path,
        filename: str,
        save_optimizer: bool = True,
        save_param_scheduler: bool = True,
        meta: Mapping[str, Any] | None = None,
        async_save: bool = False,
        verify: bool = False,
    ) -> str:
        """Write a checkpoint; every process must call it."""

    def finish_saving(self, wait: bool = True) -> bool:
        """Wait for the checkpoint that is being written in the background."""

    def is_marked(self, path: str | Path) -> bool:
        """Whether a checkpoint of this run holds NaN or infinity where it should not."""

    def use_data_seed(self, seed: int) -> None:
        """Order the training data by another seed."""
