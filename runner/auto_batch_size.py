"""The largest batch size that fits into memory, found by updates of a model that is built for that and thrown away."""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from ..core.base.errors import ConfigError, LaunchError
from ..core.base.snapshot import Snapshot
from ..core.checkpoint import Checkpoint, as_path
from ..core.comm.agreement import roll_call
from ..core.comm.collectives import all_gather_object
from ..core.device.device import empty_cache
from ..core.random.generators import kept_random_state
from ..optim.wrapper_dict import build_optim_wrapper
from ..strategies.parts import meet
from .data import checks as first_samples
from .data.checks import AUTO
from .data.first_batches import first_batches, only_once, parts_of
from .data.samplers import InfiniteSampler
from .data.user_loaders import length_of
from .loops.dry_pass import PATIENCE_S
from .loops.step import Stepper
from .resume.choose_checkpoint import find_start

_WHERE = "train_dataloader.batch_size"
_FIRST = 2  # batch normalisation cannot train on one sample
_UPDATES = 2  # the second one has activations and the optimizer's state in memory at the same time


def with_batch_size(run: Any, parts: Any, dataloader: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of the training data with a number in place of ``batch_size="auto"``; a collective then.

    A run that is resumed goes on with the number of its checkpoint. Otherwise sizes are doubled, and the gap to the first that
    does not fit is halved, until the largest is known that fits on every process. A trial is two updates on the first
    samples, with a strategy, model and optimizer of its own: of those of the run, and of random states and samplers, nothing
    changes, so that training is that with this number in the configuration.

    Args:
        run: the runner.
        parts: its parts.
        dataloader: the runner's ``train_dataloader``.

    Raises:
        ConfigError: it cannot be found for this run, or one sample does not fit.
        LaunchError: memory was too small on some processes only, while the others waited for them.
    """
    meet(run.strategy, f'{_WHERE}="{AUTO}"')
    source, resumed = (parts.resumed_from, True) if parts.resumed_from is not None else find_start(run)
    if source is not None and resumed:
        facts = Checkpoint.open_together(as_path(source)).values.get("data")
        if isinstance(facts, dict) and isinstance(size := facts.get("batch_size"), int):
            run.logger.info(f"{_WHERE}: {size}, as in {source}")
            return {**dataloader, "batch_size": size}
    _check(run, parts)
    size, too_large = _largest(run, parts, dataloader)
    why = "all samples that a process has" if too_large is None else f"{too_large} do not fit into memory"
    run.logger.info(f"{_WHERE}: {size} of each process, {why}")
    return {**dataloader, "batch_size": size}


def _check(run: Any, parts: Any) -> None:
    if why := run.strategy.needs.processes:  # so has a second strategy of this process the same ones
        raise ConfigError(f'{_WHERE}: "{AUTO}" cannot be tried beside the run, {why}; give a number')
    if not isinstance(parts.config.given["optim_wrapper"], Mapping):
        raise ConfigError(f'{_WHERE}: "{AUTO}" needs optim_wrapper as a dict, of which it makes one for the trial')


def _largest(run: Any, parts: Any, dataloader: Mapping[str, Any]) -> tuple[int, int | None]:
    """Return the largest size that fits, and the smallest that does not; None: all samples fit."""
    trial: _Trial | None = None
    fits, too_large, size = 0, None, _FIRST
    level, logger = run.logger.level, run.logger
    try:
        logger.setLevel(logging.WARNING)  # a trial is not the run
        while too_large is None or too_large - fits > 1:
            trial = trial or _Trial(run, parts, dataloader)
            size = min(size, trial.most)
            if trial.fits(size):
                fits = size
                if fits >= trial.most:
                    return fits, None
            else:
                too_large = size
                trial.end()
                trial = None
                _let_go(run)
            size = 2 * fits if too_large is None else (fits + too_large) // 2
    finally:
        if trial is not None:
            trial.end()
        trial = None
        _let_go(run)
        logger.setLevel(level)
    if not fits:
        raise ConfigError(
            f"{_WHERE}: not even one sample fits into memory; a smaller model, or a strategy that shards it"
        )
    return fits, too_large


def _let_go(run: Any) -> None:
    gc.collect()
    empty_cache(run.strategy.device)


class _Trial:
    """A copy of the run with a strategy, model and optimizer of its own.

    Args:
        run: the runner.
        parts: its parts.
        dataloader: the configuration of its training data.
    """

    def __init__(self, run: Any, parts: Any, dataloader: Mapping[str, Any]) -> None:
        strategy = run.strategy
        self._run = own = copy.copy(run)
        self._dataloader = {key: value for key, value in dataloader.items() if key != first_samples.KEY}
        given = {**parts.config.given, "train_dataloader": {**dataloader, "batch_size": 1}}
        if isinstance(model := given["model"], nn.Module):
            given["model"] = copy.deepcopy(model)
        elif callable(model) and not isinstance(model, type):  # a function may give the same module every time
            given["model"] = lambda: copy.deepcopy(model())
        own.strategy = type(strategy)(
            **{key: getattr(strategy.config, key) for key in strategy.config.model_fields_set}
        )
        config = replace(parts.config, given=given, optim_wrapper=build_optim_wrapper(given["optim_wrapper"]))
        own._parts = self._parts = type(parts)(own, config, run._as_current)
        with kept_random_state(strategy.device):
            own.strategy.join()
            loader = self._loader(1)
            self._dataloader["dataset"] = loader.dataset  # made once for all sizes
            read = length_of(loader)  # processes may have data of their own
            if isinstance(loader.sampler, InfiniteSampler):
                read = loader.sampler.num_samples // loader.sampler.count
            lengths = all_gather_object(read)
            known = [length for length in lengths if length is not None]
            if len(known) < len(lengths):
                raise ConfigError(f'{_WHERE}: "{AUTO}" needs data with a length; give a number')
            self.most = max(min(known), 1)
            self._parts.set_up()
        stepper = own.stepper
        is_whole = (
            not any(isinstance(each, DTensor) for each in own.strategy.module.parameters())
            and not self._parts.has_engine
        )
        if is_whole:  # then no process waits for another one that has no memory left
            stepper = _Apart(own.strategy, own.model, own.optim_wrapper)
        self._stepper: Stepper = stepper

    def fits(self, size: int) -> bool:
        """Return whether updates with this size fit into the memory of every process; a collective."""
        strategy = self._run.strategy
        batch, problem = None, None
        for _ in range(_UPDATES):
            try:
                with kept_random_state(strategy.device):
                    batch = self._batch(size) if batch is None else batch
                    self._run.model.train()
                    self._stepper.train([batch] * self._run.accumulate)
            except Exception as error:
                if not _is_out_of_memory(error):
                    raise
                problem = " ".join(str(error).split())
            self._meet(size, problem)
            if any(all_gather_object(problem is not None)):
                return False
        return True

    def end(self) -> None:
        """Let go of the model; the process group stays."""
        self._run.strategy.leave()
        self._parts.let_go()

    def _batch(self, size: int) -> Any:
        loader, strategy, own = self._loader(size), self._run.strategy, self._run
        kept = Snapshot(parts_of(loader), (own, strategy, strategy.topology, own.logger, own.message_hub))
        try:
            options = dict(seed=own.seed, epoch=0, shard=strategy.topology.shard)
            with first_batches(loader, 1, **options) as batches:
                return next(iter(batches))
        finally:
            kept.restore()

    def _meet(self, size: int, problem: str | None) -> None:
        limit = float(self._run.strategy.config.timeout_s)
        missing = roll_call(f"a trial of {_WHERE} {size}", limit if problem is None else min(PATIENCE_S, limit / 2))
        if missing is not None:
            raise LaunchError(
                f"{_WHERE}: {size} was tried, {problem or 'and other processes did not end the trial'}; {missing}; give a number"
            )

    def _loader(self, size: int) -> DataLoader[Any]:
        cfg = {**self._dataloader, "batch_size": size}
        loader = self._parts.build_dataloader(cfg, "train_dataloader", True, self._run.seed)
        if reason := only_once(loader):
            raise ConfigError(f'{_WHERE}: "{AUTO}" needs data that can be read again, {reason}; give a number')
        return loader  # type: ignore[no-any-return]


class _Apart(Stepper):
    """Makes updates of this process alone: gradients are not reduced."""

    def begin(self, index: int) -> bool:
        """See TrainStep."""
        super().begin(index)
        return False


def _is_out_of_memory(error: Exception) -> bool:
    text = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, (RuntimeError, MemoryError))
        and ("out of memory" in text or "can't allocate memory" in text or isinstance(error, MemoryError))
    )
