"""BaseLoop, the base class of all loops, and what a loop of the user's sees of the run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ...core.base.errors import ConfigError
from ...core.base.overriding import overridden
from ...core.comm.collectives import all_gather_object
from ...core.comm.topology import gathering
from ...strategies.parts import share_buffers
from ..data.checks import check_same_begin, check_same_data, check_same_length, needs_same_data, print_of
from ..data.lockstep import HeldBatches, until_all_end
from ..data.readers import Feed, Reader
from ..data.sample_seeds import order_seed
from ..data.samplers import divided_sampler
from ..data.user_loaders import goes_its_own_way, length_of

if TYPE_CHECKING:
    from ..run import Run

# EvaluationData: one pass over validation or test data, in step with the other processes.


EVALUATION = -1
"""Epoch number for the random numbers of evaluation data, which makes them the same every time."""


class EvaluationData:
    """Gives every process equally many batches: one with fewer repeats its last one.

    Args:
        loader: result of ``build_dataloader``.
        runner: the run, for its seed and its processes.
        where: the configuration key, for messages.
    """

    def __init__(self, loader: Any, runner: Run, where: str) -> None:
        self.loader, self._runner, self._where = loader, runner, where
        self._has_compared = False
        self._topology = runner.strategy.topology
        own_way = goes_its_own_way(loader)
        self._reader = Reader(loader) if own_way else None
        self._feed = None if own_way else Feed(loader, self._topology.shard)
        self._held = HeldBatches(where, 2)  # beside other processes one is read ahead
        self._passed, self.done = 0, 0  # batches of the last pass, and of the current one
        self.given = 0  # batches of all passes, also those of other processes

    @property
    def num_batches(self) -> int:
        """Batches of this process; without a known length, those of the last pass, or of the current one so far."""
        length = length_of(self.loader)
        return max(self._passed, self.done) if length is None else length

    def batches(self) -> Iterator[tuple[Any, bool]]:
        """Yield the batches of a pass, each with True if it is this process's own."""
        self._passed, self.done = self.done, 0
        for batch, is_own in self._pass():
            self.done += is_own
            self.given += 1
            yield batch, is_own

    def close(self) -> None:
        """End worker processes that would be kept for the next pass."""
        if self._feed is not None:
            self._feed.close()

    def _compare(self, seed: int) -> None:
        """Raise ConfigError if the processes need the same data and have others."""
        self._has_compared, dataset = True, getattr(self.loader, "dataset", None)
        divided = divided_sampler(self.loader)
        needed, lengths, prints, begins = zip(
            *all_gather_object(
                (
                    needs_same_data(self.loader, self._topology.shard),
                    length_of(dataset),
                    print_of(dataset),
                    None if divided is None else divided.begin(seed),
                )
            ),
            strict=True,
        )
        check_same_begin(begins, self._where)
        if any(needed):
            check_same_length(lengths, self._where)
            check_same_data(prints, self._where)

    def _pass(self) -> Iterator[tuple[Any, bool]]:
        seed = self._runner.seed
        if not (self._topology.is_alone or self._has_compared):
            self._compare(order_seed(seed, EVALUATION))
        if self._feed is not None:
            one_pass = self._feed.batches(seed, EVALUATION)
        else:
            assert self._reader is not None
            one_pass = self._reader.batches(seed, 0, None)
        if self._topology.is_alone:
            return ((batch, True) for batch in one_pass)
        return until_all_end(self._held.of(one_pass), float(self._runner.strategy.config.timeout_s))


METHODS = ("run", "run_epoch", "run_iter", "batches")
"""The methods of a loop that a subclass may define anew."""


class EvaluationCut(BaseException):
    """Leaves a validation in which all processes end; the training loop catches it."""


class BaseLoop:
    """Base class of all loops; a direct subclass evaluates, and defines ``run``.

    A subclass that defines ``run``, ``run_epoch`` or ``run_iter`` anew is written as with MMEngine: its ``dataloader``
    gives the batches that are due (after resuming, the rest of an epoch), and the ``model`` of its ``runner`` has
    ``train_step``, ``val_step`` and ``test_step``, which the strategy carries out.

    Args:
        runner: the runner that the loop belongs to.
        dataloader: built, and split over processes; or the configuration of one.
    """

    mode = "val"

    def __init__(self, runner: Run, dataloader: Iterable[Any] | Mapping[str, Any]) -> None:
        self._runner = runner
        self.loader: Any = runner.build_dataloader(dataloader) if isinstance(dataloader, Mapping) else dataloader
        self.has_own_methods = bool(overridden(self, *METHODS))
        self.runner: Any = RunnerOfLoop(self) if self.has_own_methods else runner
        self.dataloader: Any = LoaderOfLoop(self) if self.has_own_methods else self.loader
        self.after_batch: Callable[[], None] | None = None
        """Called after every batch of an evaluation, equally often on every process; set by the training loop."""
        self._data: EvaluationData | None = None
        self._last_mode = self.mode

    def _replaced(self) -> ConfigError:
        """The error for a loop that got another dataloader, whose position and shards nobody knows."""
        return ConfigError(
            f"{type(self).__name__}.dataloader: was replaced by another {type(self.dataloader).__name__} after set-up; change its dataset or collate_fn in "
            "place, or end this run and resume it with the other one"
        )

    def run(self) -> Any:
        """Run the loop over its data; every loop must define it."""
        raise NotImplementedError(f"{type(self).__name__}.run() is not defined")

    def batches(self) -> Iterator[Any]:
        """Yield the batches that are due, which a loop with methods of its own gets from ``self.dataloader``."""
        if self.dataloader is not self.loader and not self.has_own_methods:
            raise self._replaced()
        share_buffers(self._runner.strategy)  # after the hooks before an evaluation, which may average them
        return self._own_batches()

    def _own_batches(self) -> Iterator[Any]:
        for batch, is_own in self._evaluation_data.batches():
            if is_own:
                yield batch
            else:
                self._keep_in_step(batch)
            if self.after_batch is not None:
                self.after_batch()
            if self._runner.stop_check is not None:
                self._runner.stop_check("batch")

    def _keep_in_step(self, batch: Any) -> None:
        """Run forward for a batch that is not this process's own, because forward may run collectives; drop the result."""
        with gathering(counts=False):
            self._forward(batch)

    def dry_run(self, num_batches: int) -> None:
        """Evaluate the first ``num_batches`` so that nothing has changed afterwards, see DryPass.

        Left out if a subclass has methods of its own.
        """
        own = " and ".join(overridden(self, *METHODS))
        self._runner.logger.info(f"Dry pass: left out, {type(self).__name__} defines its own {own}")

    @property
    def num_batches(self) -> int:
        """Batches of this process; without a known length, those of the last pass, or of the current one so far."""
        return self._evaluation_data.num_batches

    @property
    def _evaluation_data(self) -> EvaluationData:
        if self._data is None:
            self._data = EvaluationData(self.loader, self._runner, f"{self.mode}_dataloader")
        return self._data

    def _forward(self, batch: Any, mode: str | None = None) -> Any:
        """Return the model's predictions for an evaluation batch; ``mode`` is "val" or "test", by default the last one."""
        self._last_mode = mode or self._last_mode
        with torch.no_grad():
            return self._runner.stepper.evaluate(batch, self._last_mode)

    def _update(self, data_batch: Any) -> Any:
        """Make an update; only a training loop can."""
        raise ConfigError(f"{self.mode}_cfg.type: {type(self).__name__} evaluates, and must not call train_step")

    def _steps(self) -> int:
        """A number that changes while the loop gets on; the watchdog's thread reads it."""
        return 0 if self._data is None else self._data.given

    def _end_workers(self) -> None:
        """End worker processes that would be kept for the next pass."""
        if self._data is not None:
            self._data.close()

    def _at_hook(self, point: str) -> None:
        """Take note that a method of a subclass calls the hooks at ``point``."""


class LoaderOfLoop:
    """The dataloader as a loop with methods of its own sees it: iterating gives the batches that are due."""

    def __init__(self, loop: BaseLoop) -> None:
        self._loop = loop

    def __iter__(self) -> Iterator[Any]:
        return self._loop.batches()

    def __len__(self) -> int:
        length: int | None = getattr(self._loop, "epoch_length", None) or length_of(self._loop.loader)
        if length is None:
            raise TypeError(f"{type(self._loop.loader).__name__} has no length")
        return length

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop.loader, name)


class RunnerOfLoop:
    """The runner as a loop with methods of its own sees it: its model has MMEngine's steps."""

    def __init__(self, loop: BaseLoop) -> None:
        vars(self)["_loop"] = loop

    @property
    def model(self) -> ModelOfLoop:
        """The model, with ``train_step``, ``val_step`` and ``test_step``."""
        return ModelOfLoop(self._loop)

    def call_hook(self, fn_name: str, **kwargs: Any) -> None:
        """Call every hook at a hook point."""
        self._loop._at_hook(fn_name)
        self._loop._runner.call_hook(fn_name, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop._runner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._loop._runner, name, value)


class ModelOfLoop:
    """The runner's model with MMEngine's steps, which the strategy carries out."""

    def __init__(self, loop: BaseLoop) -> None:
        self._loop = loop

    def train_step(self, data_batch: Any, optim_wrapper: Any = None) -> Any:
        """Make the update of what ``run_iter`` got, and return the values to log.

        Raises:
            ConfigError: ``optim_wrapper`` is not the runner's.
        """
        if optim_wrapper is not None and optim_wrapper is not self._loop._runner.optim_wrapper:
            raise ConfigError(
                f"train_cfg.type: {type(self._loop).__name__} calls train_step with another optim_wrapper than the "
                "runner's, whose state no checkpoint would have"
            )
        return self._loop._update(data_batch)

    def val_step(self, data_batch: Any) -> Any:
        """Return the predictions for a batch of validation data."""
        return self._loop._forward(data_batch, "val")

    def test_step(self, data_batch: Any) -> Any:
        """Return the predictions for a batch of test data."""
        return self._loop._forward(data_batch, "test")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._loop._runner.model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop._runner.model, name)
