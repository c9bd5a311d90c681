"""Buffers, such as running statistics, that each process may have written on data of its own."""

from __future__ import annotations

from functools import singledispatch

from ...core.comm.collectives import floating_buffers
from ..base import Strategy


@singledispatch
def keep_own_buffers(strategy: Strategy) -> None:
    """Let running statistics follow what each process trains on, unless an option says otherwise; before training.

    Their means over the processes then stand for all data. Most strategies do so anyway.
    """


@singledispatch
def share_buffers(strategy: Strategy) -> None:
    """Give every process the floating-point buffers of the first data shard; a collective, before evaluation.

    Running statistics depend on a process's training data. With different ones, metrics would depend on which
    process evaluates which sample.
    """
    strategy.topology.data.share(floating_buffers(strategy.module))


@singledispatch
def average_buffers(strategy: Strategy) -> None:
    """Give every process the means of the floating-point buffers over the data shards; a collective."""
    strategy.topology.data.average(floating_buffers(strategy.module))
