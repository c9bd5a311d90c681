"""What resuming does with the single pieces of a checkpoint: the place in the data, schedules, random states, hooks."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pydantic

from ...core.comm.together import gather_differing, raising_together
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
    """How to do without pieces of a checkpoint; None: one that no run can do without."""
    known = [name for name in names if name is not None]
    if len(known) < len(names):
        return "load_from takes its weights alone"
    options, it = ", ".join(f"{name}=False" for name in known), "it" if len(known) == 1 else "them"
    return f"resume=dict({options}) leaves {it} out, {', '.join(_WITHOUT[name] for name in known)}"


@contextmanager
def piece(path: Path, key: str, name: str | None = None) -> Iterator[None]:
    """Say which piece of a checkpoint is not what was saved there, and under which name it can be left out.

    Raises:
        CheckpointError: in place of whatever the piece made others raise; on one line.
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
    """Where the data stand, and what that place means."""

    seed: int
    """The run's."""
    sampler: str
    """The class that says which batch comes when."""
    sampler_seed: int | None
    shuffle: bool | None
    num_samples: int | None
    """Of the dataset; None for a stream without a length."""
    shards: int
    """Over how many processes the samples are dealt out."""
    batch_size: int | None
    accumulate: int
    drop_last: bool
    epoch_length: int | None
    """Updates of a whole epoch."""
    position: int | None = pydantic.Field(ge=0)
    """Samples of the epoch that come before the next update; None where only the sampler knows."""
    by_index: bool = False
    """Whether the order is computed by index; checkpoints of before that do not say so."""
    workers: int | None = None
    """That read a stream, whose order may depend on them; None for other data, and in older checkpoints."""


# What makes an order another one, and what makes other batches of it.
_ORDER = ("sampler", "sampler_seed", "shuffle", "num_samples")
_BATCHES = ("shards", "batch_size", "accumulate", "drop_last", "epoch_length", "workers")


def data_facts(runner: Run, loop: Mapping[str, Any]) -> DataFacts:
    """The facts now, with the loop where its state says."""
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
    """Raise ValueError or KeyError for a state of a loop that does not count."""
    for key in ("epoch", "iter", "inner", "validated", "left"):
        if not isinstance(loop[key], int) and not (key == "left" and loop[key] is None):
            raise ValueError(f"{key} is {loop[key]!r}")


def begin_epoch_anew(data: TrainData, loop: Mapping[str, Any]) -> dict[str, Any]:
    """The loop's state without a place in the data: at the beginning of the epoch, or at its end if it was there."""
    return _at_the_end(data, loop) if loop["left"] == 0 else {**loop, "inner": 0}


def continue_epoch(runner: Run, saved: Any, loop: Mapping[str, Any]) -> dict[str, Any]:
    """The loop's state with its place in the data counted in the updates of this run.

    With flextrain's samplers and torch's batches the epoch goes on with the next sample in whatever batches there are now,
    on however many processes; for anything else both have to be what they were, unless the epoch is over.

    Raises:
        CheckpointError: the rest of the epoch would be others than its samples that are left.
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
        why = f", and what a {now.sampler} gives cannot be dealt out anew" if alike else ""
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
            f"Epoch {loop['epoch'] + 1} goes on after {position} samples; its next update is number {inner + 1} in the "
            "batches that there are now"
        )
    return {**loop, "inner": inner}


def _say_what_changed(runner: Run, then: DataFacts, now: DataFacts, changed: Sequence[str]) -> None:
    reasons = [f"{key} {getattr(then, key)} -> {getattr(now, key)}" for key in changed if key != "epoch_length"]
    runner.logger.warning(
        f"An epoch has {now.epoch_length} iterations now, it had {then.epoch_length} ({', '.join(reasons) or 'other data'}): "
        "schedules by iteration go on by their count"
    )


def load_loader(runner: Run, states: Sequence[Any], loop: Mapping[str, Any]) -> None:
    """Let a training loader that has a state of its own go on there.

    Raises:
        CheckpointError: in the middle of an epoch there is none for every process, or for none that the loader has.
    """
    data, (index, count) = runner.train_loop.data, runner.strategy.topology.shard
    states = states or [None] * count  # checkpoints had none before there were such loaders
    had_one = any(state is not None for state in states)
    if not data.keeps_place and not had_one:
        return
    if data.keeps_place and had_one and len(states) == count:
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
    runner.logger.warning(f"The loader begins anew with the next epoch: {why}")


# The optimizer


def check_optimizer(runner: Run, values: Mapping[str, Any]) -> None:
    """See that every parameter has the settings that the checkpoint has under its name, whatever group it is in now.

    Raises:
        CheckpointError: parameters share a group that had different settings, or the checkpoint lacks one.
    """
    now = _settings(runner)
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


def _settings(runner: Run) -> dict[str, Any]:
    return {key: value for key, value in runner.strategy.state_dict().items() if key.startswith(GROUP)}


def _optimized(key: str) -> str:
    """The parameter that a key of the hyper-parameters says is optimized, which every optimized one has; else empty."""
    _, parameter, item = split_key(key)
    return parameter if item == KIND else ""


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-6)  # one may have been a float32 tensor meanwhile
    return bool(one == other)


# Hooks


def check_hooks(
    runner: Run, saved: Mapping[str, Sequence[str]], present: Container[str], own: Mapping[str, Any]
) -> None:
    """See that what the hooks had saved is all there, and say which hooks are new and which are gone.

    Args:
        runner: whose hooks.
        saved: by the hook's name, the keys of its state.
        present: the keys of the checkpoint.
        own: by the hook's name, the state that it has now.

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
    """Let every scheduler go on; the configuration has to have those that the checkpoint has, in the same order.

    Args:
        runner: the run.
        saved: the states, by the name of the optimizer.
        set_values: also put the values in force that were, for an optimizer whose own state is left out.

    Raises:
        CheckpointError: others, more or fewer.
    """
    for name, group in runner.schedulers.items():
        states = saved.get(name, [])
        if len(states) != len(group):
            kinds = ", ".join(type(scheduler).__name__ for scheduler in group)
            optimizer = f" for the optimizer {name}" if name else ""
            raise CheckpointError(
                f"has {counted(len(states), 'parameter scheduler')}{optimizer}, the configuration has {len(group)}"
                f"{f' ({kinds})' if kinds else ''}; they go on together or not at all"
            )
        for scheduler, state in zip(group, states, strict=True):
            scheduler.load_state_dict(state)
            if set_values:
                scheduler.set_values(state["values"], state["base_values"])


@contextmanager
def schedules_anew(runner: Run) -> Iterator[None]:
    """What schedulers have set stays when the optimizer's state comes back: they start afresh, and count on it."""
    own = [(scheduler, scheduler.get_values()) for group in runner.schedulers.values() for scheduler in group]
    yield
    for scheduler, values in own:
        scheduler.set_values(values, scheduler.base_values)


@contextmanager
def telling_what_differs(runner: Run) -> Iterator[None]:
    """Log the optimizers' settings which are not those of the configuration any more."""
    before = _settings(runner)
    yield
    after = _settings(runner)
    replaced: dict[str, str] = {}
    for key, value in after.items():
        parameter, _, setting = key.rpartition(".")
        scheduled = f"{parameter}.initial_{setting}" in before  # what its schedule began with is compared instead
        if not scheduled and key in before and not _same(value, before[key]):
            replaced.setdefault(setting.removeprefix("initial_"), f"{value} instead of {before[key]}")
    if replaced:
        runner.logger.warning(
            f"The optimizer goes on with the checkpoint's settings, not the configuration's: "
            f"{', '.join(f'{setting} {values}' for setting, values in replaced.items())}; "
            "resume=dict(optimizer=False) would begin with the configuration's"
        )


# Random states


def load_random(runner: Run, states: Sequence[Any], written_by: int) -> None:
    """Give every process the random state of its part of the data back; among another number of parts all begin new streams.

    Args:
        runner: the run.
        states: one for each part.
        written_by: the number of parts then.

    Raises:
        CheckpointError: a state is missing.
    """
    index, count = runner.strategy.topology.shard
    if len(states) != written_by:
        writers = counted(written_by, "process", "processes")
        raise CheckpointError(f"was written by {writers} and has random states of {len(states)}")
    if written_by == count:
        load_rng_state(states[index], runner.strategy.device)
        return
    seed_process(runner.seed, runner.iter, index)
    runner.logger.warning(
        f"The checkpoint was written by {counted(written_by, 'process', 'processes')} and there {_are(runner)}: random states are not restored, dropout "
        f"draws on from a seed made of the run's ({runner.seed}), the iteration ({runner.iter}) and the rank"
    )


def _are(runner: Run) -> str:
    """How many processes there are, or of those that train on data of their own, where several share them."""
    topology = runner.strategy.topology
    number = f"{'is' if topology.data.count == 1 else 'are'} {topology.data.count}"
    return f"{number} with data of their own" if topology.shares_data else number
