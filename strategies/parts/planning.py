"""What a plan has to know of a strategy, where all processes of a job are pretended."""

from __future__ import annotations

from functools import singledispatch

from ..base import Strategy


@singledispatch
def rehearsed(strategy: Strategy) -> Strategy | None:
    """Return the strategy that a plan executes in place of this one; None if a plan is not possible.

    By default itself, or None if ``needs.processes`` says that its ranks must be real processes. Such a strategy can
    register one with the same options that makes the tensors and calls the collectives of a rank by formula, as plain
    operations of torch, and that has a method ``tell(listen)``: ``listen(kind, tensors)`` is to be called with what the memory of tensors is
    for. Plans say that it is so.
    """
    return None if strategy.needs.processes else strategy


@singledispatch
def pipeline_of(strategy: Strategy) -> tuple[str, int] | None:
    """Return the schedule of a pipeline, by its name, and the number of stages of each process; None without a pipeline."""
    return None
