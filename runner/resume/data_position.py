"""Resume at the position in the data where a checkpoint was written, also with other batches or processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pydantic

from ...core.base.config import Config, validate
from ...core.base.errors import CheckpointError, counted
from ...core.random.generators import load_rng_state, seed_process
from ..data.checks import print_of
from ..data.dataloaders import LeftOut, TrainData
from ..data.user_loaders import batch_size

if TYPE_CHECKING:
    from ..run import Run

# Restore the RNG states of the processes.


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
        writers = counted(written_by, "data shard")
        raise CheckpointError(f"was written with {writers} and has RNG states of {len(states)}")
    if written_by == count:
        load_rng_state(states[index], runner.strategy.device)
        return
    seed_process(runner.seed, runner.iter, index)
    runner.logger.warning(
        f"The checkpoint was written with {counted(written_by, 'data shard')} and there {are_now(runner)}: RNG states are not "
        f"restored, they start from a seed made of the run's ({runner.seed}), the iteration ({runner.iter}) and the rank"
    )


def are_now(runner: Run) -> str:
    """Return the number of data shards for a message; each is one process, or several that share its samples."""
    count = runner.strategy.topology.data.count
    return f"{'is' if count == 1 else 'are'} {count} now"


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
    fingerprint: str | None = None
    """The dataset's ``fingerprint``, which changes with its files; None for others and older checkpoints."""
    own_draws: bool | None = None
    """Whether a sampler or loader that is not flextrain's draws other numbers in every shard; older checkpoints do not have this key."""
    left_out: list[LeftOut] = []
    """What is jumped over, because training went back; older checkpoints do not have this key."""

    @property
    def samples_of_an_update(self) -> int | None:
        """Samples of a whole update; None if batches have no fixed size."""
        return None if self.batch_size is None else self.shards * self.batch_size * self.accumulate


# Settings that determine the order of samples, and settings that determine how it is cut into batches.
_ORDER = ("sampler", "sampler_seed", "shuffle", "num_samples")
_BATCHES = ("shards", "batch_size", "accumulate", "drop_last", "epoch_length", "workers", "own_draws")
_LOADERS = ("StreamLoader", "StatefulDataLoader")  # named by older checkpoints for the stream that they read
_OF_AN_UPDATE = ("shards", "batch_size", "accumulate")


def data_facts(runner: Run, loop: Mapping[str, Any]) -> DataFacts:
    """Return the facts of the current data, at the position that the loop's state names."""
    data = runner.train_loop.data
    sampler = data.splittable
    return DataFacts(
        seed=runner.seed,
        sampler=data.sampler_name,
        sampler_seed=None if sampler is None else sampler.seed,
        shuffle=None if sampler is None else sampler.shuffle,
        num_samples=data.num_samples,
        shards=runner.strategy.topology.data.count,
        batch_size=batch_size(runner.train_dataloader),
        accumulate=runner.accumulate,
        drop_last=data.drop_last,
        epoch_length=data.epoch_length,
        position=data.position(loop["epoch"], loop["inner"]),
        by_index=sampler is not None and sampler.by_index,
        workers=data.stream_workers,
        fingerprint=data.prints or print_of(data.dataset),
        own_draws=data.diff_rank_seed and data.draws_apart,
        left_out=data.left_out,
    )


def check_counts(loop: Mapping[str, Any]) -> None:
    """Raise ValueError or KeyError if a counter of the loop's state is missing or not a number."""
    for key in ("epoch", "iter", "inner", "validated", "left"):
        if not isinstance(loop[key], int) and not (key == "left" and loop[key] is None):
            raise ValueError(f"{key} is {loop[key]!r}")


def begin_epoch_anew(data: TrainData, loop: Mapping[str, Any]) -> dict[str, Any]:
    """Return the loop's state at the beginning of its epoch, or at the end if the epoch was finished."""
    return _at_the_end(data, loop) if loop["left"] == 0 else {**loop, "inner": 0}


def continue_epoch(
    runner: Run, saved: Any, loop: Mapping[str, Any], left_out: Sequence[LeftOut] = ()
) -> dict[str, Any]:
    """Return the loop's state with its position in the data, counted in updates of this run.

    With flextrain's samplers and torch's batches the epoch continues with the next sample, whatever the batches and the
    number of processes are now. All other data need the former settings, unless the epoch is finished.

    Args:
        runner: the run.
        saved: the ``data`` of a checkpoint.
        loop: the loop's state in it.
        left_out: what is left out besides that of which the checkpoint knows.

    Raises:
        CheckpointError: the rest of the epoch would not consist of the samples that are left.
    """
    then = validate(DataFacts, saved, "data")
    then.left_out.extend(span for span in left_out if span not in then.left_out)
    if then.seed != runner.seed:
        runner.logger.info(f"The data order continues with the checkpoint's seed {then.seed}")
        runner.use_data_seed(then.seed)
    data = runner.train_loop.data
    data.tell_samplers(loop["epoch"])
    now = data_facts(runner, loop)
    changed = [key for key in (*_ORDER, *_BATCHES) if getattr(then, key) != getattr(now, key)]
    changed = [key for key in changed if key not in ("workers", "own_draws") or getattr(then, key) is not None]
    if then.sampler in _LOADERS and "sampler" in changed:
        changed.remove("sampler")
    if data.splittable is not None and then.num_samples == now.num_samples:
        data.splittable.by_index = then.by_index
    by_iter = not runner.train_loop.by_epoch
    if then.samples_of_an_update != now.samples_of_an_update and (by_iter or then.epoch_length == now.epoch_length):
        reasons = [f"{key} {getattr(then, key)} -> {getattr(now, key)}" for key in changed if key in _OF_AN_UPDATE]
        runner.logger.warning(
            f"An update has {now.samples_of_an_update} samples now, it had {then.samples_of_an_update} ({', '.join(reasons)}): "
            f"schedules and intervals by iteration go on at iteration {loop['iter']}, whose updates had the former size"
        )
    elif then.epoch_length != now.epoch_length:
        _say_what_changed(runner, then, now, changed)
    _leave_out(data, then, loop, changed)
    if loop["inner"] == 0 and not then.position:  # a position of less than an update is in the middle, too
        return dict(loop)
    if loop["left"] == 0:
        return _at_the_end(data, loop) if changed or data.splittable else dict(loop)
    if then.fingerprint is not None and now.fingerprint != then.fingerprint:
        raise CheckpointError(
            f"was saved in the middle of an epoch of {then.fingerprint}, and the data are {now.fingerprint or 'others'} now: files or "
            f"settings of train_dataloader.dataset have changed; give the former ones, or {_instead(data.infinite)}"
        )
    _refuse(then, now, _instead(data.infinite), [key for key in changed if key in _ORDER or data.splittable is None])
    if data.splittable is None or then.position is None:
        return dict(loop)
    return _split_anew(runner, then.position, loop, bool(changed))


def _leave_out(data: TrainData, then: DataFacts, loop: Mapping[str, Any], changed: Sequence[str]) -> None:
    """Take over what is left out; raise CheckpointError if positions of what is still to come have lost their meaning."""
    data.left_out = [*then.left_out]
    for span in data.left_out:
        is_to_come = span.epoch > loop["epoch"] or (span.epoch == loop["epoch"] and not loop["inner"])
        updates_differ = span.counts == "updates" and any(key in changed for key in _OF_AN_UPDATE)
        if is_to_come and (span.counts != data.position_counts or updates_differ):
            raise CheckpointError(
                f"is to leave out {span.words()}, which cannot be found with other batches; give the former batch_size, "
                "accumulative_counts and number of processes"
            )


def _at_the_end(data: TrainData, loop: Mapping[str, Any]) -> dict[str, Any]:
    if data.epoch_length is None:
        return {**loop, "epoch": loop["epoch"] + 1, "inner": 0}
    return {**loop, "inner": data.epoch_length}


def _refuse(then: DataFacts, now: DataFacts, instead: str, changed: Sequence[str]) -> None:
    for key in changed:
        alike = all(getattr(then, k) == getattr(now, k) for k in _ORDER)
        why = f", and the order of a {now.sampler} cannot be split again" if alike else ""
        raise CheckpointError(
            f"was saved in the middle of an epoch with {key}={getattr(then, key)}, it is {getattr(now, key)} now{why}; "
            f"{instead} to change it"
        )


def _instead(endless: bool) -> str:
    """Return how to go on with other data: endless ones have no end of an epoch, and so no place to change them."""
    return "give the former data, these have no end of an epoch" if endless else "resume from the end of an epoch"


def _split_anew(runner: Run, position: int, loop: Mapping[str, Any], changed: bool) -> dict[str, Any]:
    inner = runner.train_loop.data.resume_at(loop["epoch"], position)
    if changed and not runner.train_loop.by_epoch:
        runner.logger.info(f"Pass {loop['epoch'] + 1} over the data continues after {position} samples")
    elif changed:
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
    # Those of all processes are alike in this, and may be in as many files.
    had_one = states[index if len(states) == count else 0] is not None
    if not data.keeps_position and not had_one:
        data.begin_at(loop["epoch"])
        return
    if data.keeps_position and had_one and len(states) == count:
        data.load_loader_state(states[index], loop["inner"], begins=not loop["inner"])
        return
    if len(states) != count:
        why = f"the loader's state is that of {counted(len(states), 'data shard')}, and there {are_now(runner)}"
    elif had_one:
        why = f"has the state of a loader, and {data.sampler_name} takes none"
    else:
        why = f"has no state of a loader, which {data.sampler_name} would go on from"
    if loop["inner"] and loop["left"] != 0:
        raise CheckpointError(
            f"was saved in the middle of an epoch, and {why}; resume from the end of an epoch to change it"
        )
    runner.logger.warning(f"The loader starts the next epoch without its saved state: {why}")
