"""Find what a configuration says and rarely means: things beyond the end of the run, a learning rate of 0."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..core.errors import counted
from ..optim.schedulers.run_length import before_the_warm_up_ends, unlike_the_run
from ..optim.wrapper import OptimWrapper
from ..optim.wrapper_dict import OptimWrapperDict
from .configuration import train_loop_class
from .loops.train import TrainLoop


def doubts(
    train_cfg: Mapping[str, Any],
    param_scheduler: Any,
    loop: TrainLoop,
    optim: OptimWrapper | OptimWrapperDict,
    schedulers: Mapping[str, Sequence[Any]],
    *,
    validates: bool,
) -> Iterator[str]:
    """Yield a line for each such key, to be logged before training; the run is as configured all the same.

    Args:
        train_cfg, param_scheduler: the runner's arguments.
        loop: the training loop.
        optim: the built wrapper.
        schedulers: the schedulers of each optimizer, by its name.
        validates: whether there is validation.
    """
    if validates:
        yield from _of_validation(train_loop_class(train_cfg)[1], loop)
    yield from _of_accumulation(loop)
    yield from _of_learning_rates(optim, schedulers)
    for name, group in schedulers.items():
        by_name = bool(name) and isinstance(param_scheduler, Mapping) and "type" not in param_scheduler
        given = param_scheduler[name] if by_name and name in param_scheduler else param_scheduler
        where = f"param_scheduler.{name}" if by_name else "param_scheduler"
        for i, scheduler in enumerate(group):
            steps = loop.max_epochs if scheduler.by_epoch else loop.max_iters
            key = f"{where}[{i}]" if isinstance(given, (list, tuple)) else where
            for sentence in unlike_the_run(scheduler, steps):
                yield f"{key}.{sentence}"
        for i, sentence in before_the_warm_up_ends(group):
            yield f"{where}[{i}].{sentence}"


def _of_validation(cfg: Mapping[str, Any], loop: TrainLoop) -> Iterator[str]:
    end, unit = (loop.max_epochs, "epoch") if loop.by_epoch else (loop.max_iters, "iteration")
    run = f"beyond the {counted(end, unit)} of training"
    begin, interval = cfg.get("val_begin"), cfg.get("val_interval")
    if begin is not None and begin > end:
        yield f"train_cfg.val_begin: {begin} is {run}, there is no validation; give at most {end}"
    elif interval is not None and interval > end:
        yield f"train_cfg.val_interval: {interval} is {run}, validation is done once, at the end; give less for more"
    for i, (milestone, _) in enumerate(cfg.get("dynamic_intervals") or ()):
        if milestone > end:
            yield f"train_cfg.dynamic_intervals[{i}]: {milestone} is {run}, this interval is never used"


def _of_accumulation(loop: TrainLoop) -> Iterator[str]:
    batches, size = loop.data.num_batches, loop.data.accumulate
    if batches is not None and size > batches:
        yield (
            f"optim_wrapper.accumulative_counts: {size} is more than the {counted(batches, 'batch', 'batches')} of an epoch, "
            f"windows end with the epoch and every update has {batches}; give at most {batches}"
        )


def _of_learning_rates(
    optim: OptimWrapper | OptimWrapperDict, schedulers: Mapping[str, Sequence[Any]]
) -> Iterator[str]:
    for wrapper in optim.wrappers.values():
        # A schedule may begin at 0; it multiplies the rate with which it began.
        rates = [float(group.get("initial_lr", group["lr"])) for group in wrapper.param_groups if "lr" in group]
        if rates and not any(rates):
            yield f"{wrapper.where}.optimizer.lr: 0 changes no weight; give more, or freeze the model's parameters"
