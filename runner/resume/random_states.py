"""Restore the RNG states of the processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...core.errors import CheckpointError, counted
from ...core.random_state import load_rng_state
from ...core.seed import seed_process

if TYPE_CHECKING:
    from ..run import Run


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
