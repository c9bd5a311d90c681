"""Restore the single pieces of a checkpoint: position in the data, schedules, RNG states, optimizer settings, hooks."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pydantic

from ...core.comm.joint_errors import gather_differing, raising_together
from ...core.config import Config, validate
from ...core.errors import CheckpointError, ConfigError, FlexTrainError, counted
from ...core.random_state import load_rng_state
from ...core.seed import seed_process
from ...optim.canonical import GROUP, KIND, split_key
from ..data.dataloaders import TrainData
from ..data.samplers import DefaultSampler
from ..data.user_loaders import batch_size

if TYPE_CHECKING:
    from ..run import Run


_WITHOUT = {
    "optimizer": "the optimizer's state then starts afresh",
    "param_scheduler": "schedules then start afresh",
    "random": "random numbers then come from the run's own seed",
    "hooks": "hooks then start afresh",
    "logs": "smoothed figures then start afresh",
    "data": "the epoch under way then begins anew",
}


def advice(*names: str | None) -> str:
    """Return how to resume without some pieces; None stands for a piece that every run needs."""
    known = [name for name in names if name is not None]
    if len(known) < len(names):
        return "load_from takes its weights alone"
    options, it = ", ".join(f"{name}=False" for name in known), "it" if len(known) == 1 else "them"
    return f"resume=dict({options}) leaves {it} out, {', '.join(_WITHOUT[name] for name in known)}"


@contextmanager
def piece(path: Path, key: str, name: str | None = None) -> Iterator[None]:
    """Name the piece of a checkpoint in every error of the block, and the option that leaves the piece out.

    Raises:
        CheckpointError: on one line, in place of any error that a damaged piece causes.
    """
    try:
        yield
    except ConfigError as error:
        raise CheckpointError(f"{path}: {key} is damaged, {error}; {advice(name)}") from error
    except FlexTrainError as error:
        reason = str(error).removeprefix(f"{path}: ")
        raise CheckpointError(f"{path}: {reason}; {advice(name)}") from error
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{path}: {key} is damaged, {type(error).__name__}: {reason}; {advice(name)}") from error


# The loop and the data


class DataFacts(Config):
    """The position in the data, and the settings that give it its meaning."""

    seed: int
    """Seed of the run."""
    sampler: str
    """Name of the class that determines the order of batches."""
    sampler_seed: int | None
    shuffle: bool | None
    num_samples: int | None
    """Samples of the dataset; None for a stream without a length."""
    shards: int
    """Number of data shards."""
    batch_size: int | None
    accumulate: int
    drop_last: bool
    epoch_length: int | None
    """Updates of a whole epoch."""
    position: int | None = pydantic.Field(ge=0)
    """Samples of the epoch before the next update; None if positions count batches."""
    by_index: bool = False
    """True if the order is computed by index; older checkpoints do not have this key."""
    workers: int | None = None
    """Workers that read a stream, whose order may depend on their number; None for other data and older checkpoints."""


# Settings that determine the order of samples, and settings that determine how it is cut into batches.
_ORDER = ("sampler", "sampler_seed", "shuffle", "num_samples")
_BATCHES = ("shards", "batch_size", "accumulate", "drop_last", "epoch_length", "workers")


def data_facts(runner: Run, loop: Mapping[str, Any]) -> DataFacts:
    """Return the facts of the current data, at the position that the loop's state names."""
    data = runner.train_loop.data
    sampler = data.splittable
    return DataFacts(
        seed=runner.seed,
        sampler=data.sampler_name,
        sampler_seed=sampler.seed if sampler else None,
        shuffle=sampler.shuffle if sampler else None,
        num_samples=data.num_samples,
        shards=runner.strategy.topology.data.count,
        batch_size=batch_size(runner.train_dataloader),
        accumulate=runner.accumulate,
        drop_last=data.drop_last,
        epoch_length=data.epoch_length,
        position=data.position(loop["epoch"], loop["inner"]),
        by_index=sampler.by_index if sampler else False,
        workers=data.stream_workers,
    )


def check_counts(loop: Mapping[str, Any]) -> None:
    """Raise ValueError or KeyError if a counter of the loop's state is missing or not a number."""
    for key in ("epoch", "iter", "inner", "validated", "left"):
        if not isinstance(loop[key], int) and not (key == "left" and loop[key] is None):
            raise ValueError(f"{key} is {loop[key]!r}")


def begin_epoch_anew(data: TrainData, loop: Mapping[str, Any]) -> dict[str, Any]:
    """Return the loop's state at the beginning of its epoch, or at the end if the epoch was finished."""
    return _at_the_end(data, loop) if loop["left"] == 0 else {**loop, "inner": 0}


def continue_epoch(runner: Run, saved: Any, loop: Mapping[str, Any]) -> dict[str, Any]:
    """Return the loop's state with its position in the data, counted in updates of this run.

    With flextrain's samplers and torch's batches the epoch continues with the next sample, whatever the batches and the
    number of processes are now. All other data need the former settings, unless the epoch is finished.

    Raises:
        CheckpointError: the rest of the epoch would not consist of the samples that are left.
    """
    then = validate(DataFacts, saved, "data")
    if then.seed != runner.seed:
        runner.logger.info(f"The data order continues with the checkpoint's seed {then.seed}")
        runner.use_data_seed(then.seed)
    now, data = data_facts(runner, loop), runner.train_loop.data
    changed = [key for key in (*_ORDER, *_BATCHES) if getattr(then, key) != getattr(now, key)]
    if then.workers is None and "workers" in changed:
        changed.remove("workers")
    if data.splittable is not None and then.num_samples == now.num_samples:
        data.splittable.by_index = then.by_index
    if then.epoch_length != now.epoch_length:
        _say_what_changed(runner, then, now, changed)
    if loop["inner"] == 0:
        return dict(loop)
    if loop["left"] == 0:
        return _at_the_end(data, loop) if changed or data.splittable else dict(loop)
    _refuse(then, now, [key for key in changed if key in _ORDER or data.splittable is None])
    if data.splittable is None or then.position is None:
        return dict(loop)
    return _split_anew(runner, then.position, loop, bool(changed))


def _at_the_end(data: TrainData, loop: Mapping[str, Any]) -> dict[str, Any]:
    if data.epoch_length is None:
        return {**loop, "epoch": loop["epoch"] + 1, "inner": 0}
    return {**loop, "inner": data.epoch_length}


def _refuse(then: DataFacts, now: DataFacts, changed: Sequence[str]) -> None:
    for key in changed:
        alike = all(getattr(then, k) == getattr(now, k) for k in _ORDER)
        why = f", and the order of a {now.sampler} cannot be split again" if alike else ""
        raise CheckpointError(
            f"was saved in the middle of an epoch with {key}={getattr(then, key)}, it is {getattr(now, key)} now{why}; "
            "resume from the end of an epoch to change it"
        )


def _split_anew(runner: Run, position: int, loop: Mapping[str, Any], changed: bool) -> dict[str, Any]:
    data = runner.train_loop.data
    sampler, shards = data.splittable, runner.strategy.topology.data.count
    if isinstance(sampler, DefaultSampler) and not sampler.round_up and (sampler.num_samples - position) % shards:
        raise CheckpointError(
            f"{sampler.num_samples - position} samples of the epoch are left, which round_up=False gives unevenly to "
            f"{shards} processes; leave round_up out"
        )
    inner = data.resume_at(loop["epoch"], position)
    if changed:
        runner.logger.info(
            f"Epoch {loop['epoch'] + 1} continues after {position} samples; with the current batches its next "
            f"update is number {inner + 1}"
        )
    return {**loop, "inner": inner}


def _say_what_changed(runner: Run, then: DataFacts, now: DataFacts, changed: Sequence[str]) -> None:
    reasons = [f"{key} {getattr(then, key)} -> {getattr(now, key)}" for key in changed if key != "epoch_length"]
    runner.logger.warning(
        f"An epoch has {now.epoch_length} iterations now, it had {then.epoch_length} ({', '.join(reasons) or 'other data'}): "
        "schedules by iteration continue from their own count"
    )


def load_loader(runner: Run, states: Sequence[Any], loop: Mapping[str, Any]) -> None:
    """Restore the state of a training loader that has its own.

    Raises:
        CheckpointError: in the middle of an epoch, a state is missing for a process, or the loader cannot load one.
    """
    data, (index, count) = runner.train_loop.data, runner.strategy.topology.shard
    states = states or [None] * count  # older checkpoints have no such key
    had_one = any(state is not None for state in states)
    if not data.keeps_position and not had_one:
        return
    if data.keeps_position and had_one and len(states) == count:
        data.load_loader_state(states[index], begins=not loop["inner"])
        return
    if len(states) != count:
        why = f"the loader's state is that of {counted(len(states), 'process', 'processes')}, and there {_are(runner)} now"
    elif had_one:
        why = f"has the state of a loader, and {data.sampler_name} takes none"
    else:
        why = f"has no state of a loader, which {data.sampler_name} would go on from"
    if loop["inner"] and loop["left"] != 0:
        raise CheckpointError(
            f"was saved in the middle of an epoch, and {why}; resume from the end of an epoch to change it"
        )
    runner.logger.warning(f"The loader starts the next epoch without its saved state: {why}")


# The optimizer


def check_optimizer(runner: Run, values: Mapping[str, Any]) -> None:
    """Check that every parameter can get the settings that the checkpoint has under its name, in its current group.

    Raises:
        CheckpointError: parameters in one group have different settings in the checkpoint, or it lacks a parameter.
    """
    now = _hyper_parameters(runner)
    then = {key: value for key, value in values.items() if key.startswith(GROUP)}
    with raising_together():
        _check_settings(then, now)
    lacking = set.intersection(*map(set, gather_differing(sorted(then.keys() - now.keys()))))  # on all processes
    gone = sorted(filter(None, map(_optimized, lacking)))
    if gone:
        runner.logger.warning(f"The optimizer state of {', '.join(gone)} is left out: they are not optimized now")


def _check_settings(then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for key in now:
        if key not in then and (lost := _optimized(key)):
            raise CheckpointError(f"has no optimizer state of {lost}, which was not optimized then")
    for key, value in then.items():
        if key in now and not _same(value, now[key]):
            _, name, setting = split_key(key)
            raise CheckpointError(
                f"{name} has {setting}={value}, and shares a group now with parameters that have {now[key]}; give each of "
                "them a group of its own"
            )


def _hyper_parameters(runner: Run) -> dict[str, Any]:
    return {key: value for key, value in runner.strategy.state_dict().items() if key.startswith(GROUP)}


def _optimized(key: str) -> str:
    """Return the parameter if the key is one that every optimized parameter has; otherwise an empty string."""
    _, parameter, item = split_key(key)
    return parameter if item == KIND else ""


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-6)  # a value may have been stored as a float32 tensor
    return bool(one == other)


# Hooks


def check_hooks(
    runner: Run, saved: Mapping[str, Sequence[str]], present: Container[str], own: Mapping[str, Any]
) -> None:
    """Check that the saved state of all hooks is complete, and log which hooks are new and which are gone.

    Args:
        runner: the run with the hooks.
        saved: keys of the saved state, by the hook's name.
        present: the keys of the checkpoint.
        own: current states, by the hook's name.

    Raises:
        CheckpointError: a key is missing.
    """
    for name, keys in saved.items():
        if lost := next((key for key in keys if key not in present), None):
            raise CheckpointError(f"has no {lost}")
        if name not in own:
            runner.logger.info(f"The state of {name} is left out: the run has no such hook")
    for name, state in own.items():
        if state and name not in saved:
            runner.logger.info(f"{name} starts afresh: the checkpoint has no state of it")


# Schedules


def load_schedulers(runner: Run, saved: Mapping[str, Sequence[Any]], set_values: bool) -> None:
    """Restore every scheduler; the configuration must have the schedulers of the checkpoint, in the same order.

    Args:
        runner: the run.
        saved: the states, by the optimizer's name.
        set_values: also set the saved learning rates and momenta, for an optimizer whose own state is left out.

    Raises:
        CheckpointError: the number of schedulers differs, or a state does not fit.
    """
    for name, group in runner.schedulers.items():
        states = saved.get(name, [])
        if len(states) != len(group):
            kinds = ", ".join(type(scheduler).__name__ for scheduler in group)
            optimizer = f" for the optimizer {name}" if name else ""
            raise CheckpointError(
                f"has {counted(len(states), 'parameter scheduler')}{optimizer}, the configuration has {len(group)}"
                f"{f' ({kinds})' if kinds else ''}; resume all of them or none"
            )
        for scheduler, state in zip(group, states, strict=True):
            scheduler.load_state_dict(state)
            if set_values:
                scheduler.set_values(state["values"], state["base_values"])


@contextmanager
def schedules_anew(runner: Run) -> Iterator[None]:
    """Keep the values set by schedulers while the optimizer's state is loaded, because schedules start again."""
    own = [(scheduler, scheduler.get_values()) for group in runner.schedulers.values() for scheduler in group]
    yield
    for scheduler, values in own:
        scheduler.set_values(values, scheduler.base_values)


@contextmanager
def telling_what_differs(runner: Run) -> Iterator[None]:
    """Warn if the optimizer's settings in the checkpoint differ from those in the configuration."""
    before = _hyper_parameters(runner)
    yield
    after = _hyper_parameters(runner)
    replaced: dict[str, str] = {}
    for key, value in after.items():
        parameter, _, setting = key.rpartition(".")
        scheduled = f"{parameter}.initial_{setting}" in before  # its initial value is compared instead
        if not scheduled and key in before and not _same(value, before[key]):
            replaced.setdefault(setting.removeprefix("initial_"), f"{value} instead of {before[key]}")
    if replaced:
        runner.logger.warning(
            f"The optimizer continues with the checkpoint's settings, not the configuration's: "
            f"{', '.join(f'{setting} {values}' for setting, values in replaced.items())}; "
            "resume=dict(optimizer=False) starts with the configuration's"
        )


# RNG states


def load_random(runner: Run, states: Sequence[Any], written_by: int) -> None:
    """Restore the RNG state of every data shard; with another number of shards, every process starts a new stream.

    Args:
        runner: the run.
        states: one for each data shard.
        written_by: the number of data shards when it was saved.

    Raises:
        CheckpointError: the number of states is wrong.
    """
    index, count = runner.strategy.topology.shard
    if len(states) != written_by:
        writers = counted(written_by, "process", "processes")
        raise CheckpointError(f"was written by {writers} and has RNG states of {len(states)}")
    if written_by == count:
        load_rng_state(states[index], runner.strategy.device)
        return
    seed_process(runner.seed, runner.iter, index)
    runner.logger.warning(
        f"The checkpoint was written by {counted(written_by, 'process', 'processes')} and there {_are(runner)}: RNG states are not "
        f"restored, they start from a seed made of the run's ({runner.seed}), the iteration ({runner.iter}) and the rank"
    )


def _are(runner: Run) -> str:
    """Return the number of processes, or of data shards if processes share them, for a message."""
    topology = runner.strategy.topology
    number = f"{'is' if topology.data.count == 1 else 'are'} {topology.data.count}"
    return f"{number} with data of their own" if topology.shares_data else number
