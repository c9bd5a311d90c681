"""EvaluationData: one pass over validation or test data, in step with the other processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ...core.comm.collectives import all_gather_object
from ..data.checks import check_same_begin
from ..data.dataloader_reader import Feed
from ..data.own_loader_reader import Reader
from ..data.sample_seeds import order_seed
from ..data.samplers import divided_sampler
from ..data.user_loaders import goes_its_own_way, length_of
from .lockstep import until_all_end

if TYPE_CHECKING:
    from ..run import Run

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
        self._divided = divided_sampler(loader)
        self._topology = runner.strategy.topology
        own_way = goes_its_own_way(loader)
        self._reader = Reader(loader) if own_way else None
        self._feed = None if own_way else Feed(loader, self._topology.shard)
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

    def _pass(self) -> Iterator[tuple[Any, bool]]:
        seed = self._runner.seed
        if self._divided is not None:
            check_same_begin(all_gather_object(self._divided.begin(order_seed(seed, EVALUATION))), self._where)
            self._divided = None
        if self._feed is not None:
            one_pass = self._feed.batches(seed, EVALUATION)
        else:
            assert self._reader is not None
            one_pass = self._reader.batches(seed, 0, None)
        if self._topology.is_alone:
            return ((batch, True) for batch in one_pass)
        return until_all_end(one_pass, float(self._runner.strategy.config.timeout_s))
