"""Run: the protocol of a run, as used by hooks, loops, reporters and resuming."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import nn

from ..core.hugging_face.pretrained import Description
from ..optim.wrapper import OptimWrapper
from ..optim.wrapper_dict import OptimWrapperDict
from ..strategies.base import Strategy
from .data.dataloaders import TrainData
from .loops.step import Stepper
from .options import FixedOptions
from .reporting.message_hub import MessageHub
from .reporting.model_outline import ModelOutline
from .reporting.visualizer import Visualizer


class TrainingProgress(Protocol):
    """The training loop as others see it: the current position in training, and its end."""

    by_epoch: bool
    stop_training: bool
    """A hook sets it to True to end training after the current epoch or iteration."""

    @property
    def data(self) -> TrainData:
        """The training data as windows of micro-batches."""

    @property
    def start_iter(self) -> int:
        """Updates that were completed when this process started."""

    @property
    def epoch(self) -> int:
        """Epochs completed."""

    @property
    def iter(self) -> int:
        """Updates completed."""

    @property
    def inner(self) -> int:
        """Updates completed in the current epoch."""

    @property
    def ends_with_filler(self) -> bool:
        """Whether the last micro-batch of the update under way is a repeated sample that counts nothing."""

    @property
    def max_epochs(self) -> int:
        """Total number of epochs."""

    @property
    def max_iters(self) -> int:
        """Total number of updates."""

    @property
    def epoch_length(self) -> int:
        """Number of updates in the current epoch."""

    def state_dict(self) -> dict[str, int | None]:
        """Return the position in training."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the position in ``state``."""


class Evaluation(Protocol):
    """The loop of validation or testing as others see it."""

    @property
    def num_batches(self) -> int:
        """Number of batches of this process."""

    def run(self) -> dict[str, Any]:
        """Evaluate, and return the metrics by name."""


class Run(Protocol):
    """A run in progress. FlexibleRunner implements it; a test may pass another implementation.

    The parts of the runner use this protocol and never import the runner, which avoids circular imports. Users' hooks
    get the FlexibleRunner itself, as in MMEngine.
    """

    seed: int
    config_text: str
    hugging_face: Description | None
    """The configuration file with all that it inherits, as Python; empty for a run that was not made from one."""
    stop_check: Callable[[str], None] | None
    """Called after every update ("update") and every batch of an evaluation ("batch"), once somebody asks for the end."""
    resumed_from: Path | None
    """The checkpoint that training went on from; None: it began anew."""
    late_parameters: list[str]
    """Parameters that appeared during training and were named in the log."""

    # Paths and names

    @property
    def version(self) -> str:
        """flextrain's version."""

    @property
    def cfg(self) -> dict[str, Any]:
        """The runner's arguments, for the record."""

    @property
    def options(self) -> FixedOptions:
        """The arguments that are plain values."""

    @property
    def experiment_name(self) -> str:
        """The name that reporters show."""

    @property
    def timestamp(self) -> str:
        """The time at which the run began; the name of its log folder."""

    @property
    def work_dir(self) -> str:
        """The folder for logs and checkpoints."""

    @property
    def log_dir(self) -> str:
        """The folder of this run's log."""

    @property
    def checkpoint_dir(self) -> Path:
        """The folder for checkpoints."""

    @property
    def fast_checkpoint_dir(self) -> Path | None:
        """The folder of the second tier of checkpoints; None if there is none."""

    # Output

    @property
    def logger(self) -> logging.Logger:
        """The logger of the run."""

    @property
    def message_hub(self) -> MessageHub:
        """The scalars and infos of the run."""

    @property
    def log_processor(self) -> Any:
        """The LogProcessor."""

    @property
    def visualizer(self) -> Visualizer:
        """The Visualizer, which gives scalars and pictures to all reporters."""

    @property
    def reporters(self) -> Sequence[Any]:
        """The Reporters."""

    # Processes

    @property
    def strategy(self) -> Strategy:
        """The strategy, which distributes the model over devices."""

    @property
    def outline(self) -> ModelOutline:
        """How many parameters the parts of the model have; after the model was set up."""

    @property
    def rank(self) -> int:
        """Index of this process, from 0."""

    @property
    def world_size(self) -> int:
        """Number of processes."""

    # Counters

    @property
    def epoch(self) -> int:
        """Epochs completed."""

    @property
    def iter(self) -> int:
        """Updates completed."""

    @property
    def max_epochs(self) -> int:
        """Total number of epochs."""

    @property
    def max_iters(self) -> int:
        """Total number of updates."""

    @property
    def accumulate(self) -> int:
        """Micro-batches per update."""

    def progress(self) -> tuple[int, int, int]:
        """Numbers that change while the run gets on: updates, evaluation batches, micro-batches."""

    def all_have_failed(self) -> bool:
        """Whether all processes end this run by errors of their own, so that on_exception may call a collective.

        If one has failed alone, the others are not there, and a collective would wait for them. Waits up to a second.
        """

    # Parts

    @property
    def model(self) -> nn.Module:
        """The callable of training: the user's module, or the strategy's wrapper around it."""

    @property
    def stepper(self) -> Stepper:
        """The Stepper, which makes updates and predictions with the model."""

    @property
    def optim_wrapper(self) -> OptimWrapper | OptimWrapperDict | None:
        """The optimizer wrapper, or several of them; None without training."""

    @property
    def schedulers(self) -> dict[str, list[Any]]:
        """The parameter schedulers of each optimizer, by its name."""

    @property
    def param_schedulers(self) -> Any:
        """The parameter schedulers: a list, or a dict of lists for several optimizers."""

    @property
    def train_loop(self) -> TrainingProgress:
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

    @property
    def val_dataloader(self) -> Any:
        """The validation data."""

    @property
    def test_dataloader(self) -> Any:
        """The test data."""

    def build_dataloader(self, dataloader: Any, seed: int | None = None, diff_rank_seed: bool = False) -> Any:
        """Build a dataloader of training data, split over processes."""

    # Hooks

    @property
    def hooks(self) -> Sequence[Any]:
        """The hooks in the order in which they run."""

    @property
    def hook_calls(self) -> Any:
        """The HookDispatcher."""

    def call_hook(self, fn_name: str, **kwargs: Any) -> None:
        """Call every hook at a hook point."""

    def end_with(self, error: Exception) -> None:
        """Stop training after the current epoch or iteration; train() raises ``error`` when the run has been closed."""

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
        on_error: Literal["raise", "continue"] = "raise",
    ) -> str:
        """Write a checkpoint; a collective."""

    def finish_saving(self, wait: bool = True) -> bool:
        """Wait for the save in progress in the background."""

    def was_marked(self, path: str | Path) -> bool:
        """True if this run saved the checkpoint ``path`` with NaN or infinity where values must be finite."""

    def has_saved(self, path: str | Path) -> bool:
        """True if this run saved the checkpoint ``path``, and it was complete."""

    @property
    def saving_s(self) -> float:
        """Seconds that training has waited for saves."""

    def save_failed(self, path: str | Path) -> bool:
        """True if the last save of the checkpoint ``path`` failed."""

    def saved_here(self) -> Path | None:
        """The complete checkpoint of the present position in training, if this run saved one to go on from."""

    def use_data_seed(self, seed: int) -> None:
        """Set the seed of the data order."""
