"""Results of all processes on rank 0, and metrics from there on every process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, zip_longest
from typing import Any, NamedTuple

import torch

from ...core.comm import collectives as dist
from ...core.comm.topology import Topology
from ...core.device import to_device
from ...core.errors import ConfigError, FlexTrainError

_NOTHING = object()


class _Failure(NamedTuple):
    """Why there are no metrics, for the processes that wait for them."""

    reason: str
    is_configuration: bool


def gather_results(results: Sequence[list[Any]], topology: Topology) -> list[list[Any]] | None:
    """Return the results of all data shards on rank 0, in the order of the samples, and None elsewhere; a collective.

    Args:
        results: this process's results of each metric.
        topology: says which processes have results.
    """
    own = [to_device(each, torch.device("cpu")) for each in results]
    gathered = dist.gather_object((topology.data.index, own) if topology.reports else None)
    if gathered is None:
        return None
    shards = [own for _, own in sorted(filter(None, gathered), key=lambda shard: shard[0])]
    return [_in_turn([own[i] for own in shards]) for i in range(len(results))]


def _in_turn(parts: Sequence[list[Any]]) -> list[Any]:
    """Results of several shards in the order of the samples, which a sampler dealt to them in turn."""
    return [item for item in chain.from_iterable(zip_longest(*parts, fillvalue=_NOTHING)) if item is not _NOTHING]


def from_rank_0(compute: Callable[[], dict[str, Any]] | None, name: str) -> dict[str, Any]:
    """Return what ``compute`` gives on rank 0, on every process; a collective.

    Args:
        compute: None on the other processes, which wait; they are told of an exception first.
        name: what fails, for messages.

    Raises:
        ConfigError, FlexTrainError: on the other processes, if ``compute`` raised an exception.
    """
    metrics: Any = {}
    if compute is not None:
        try:
            metrics = compute()
        except Exception as error:
            reason = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
            dist.broadcast_object(_Failure(reason, isinstance(error, ConfigError)))
            raise
    found: dict[str, Any] | _Failure = dist.broadcast_object(metrics)
    if not isinstance(found, _Failure):
        return found
    if found.is_configuration:
        raise ConfigError(found.reason)
    raise FlexTrainError(f"{name}: failed on rank 0, {found.reason}")
