"""PlannedMemoryHook: compares the memory of a run with a plan of it, once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...core.comm.collectives import all_gather
from ...core.comm.joint_errors import told_by_rank_0
from ...core.device import begin_peak, counts_memory, memory_mb
from ...strategies.base import Strategy
from ..planned_memory import PlannedMemory, planned_memory
from .hook import Hook
from .priority import get_priority

if TYPE_CHECKING:
    from ..run import Run

TOLERANCE = 0.1
"""Difference from the plan, as a share of it, beyond which the log warns."""
_FROM, _TO = 3, 5
_MIB = 2**20


class PlannedMemoryHook(Hook):
    """Measures the peak of the third to the fifth update of this process, and logs it beside the plan's.

    The first updates create the optimizer's state. Afterwards the hook is no longer called. The log line tells of the rank
    that differs most. The peak in log lines counts from then on anew.

    Args:
        planned: the plan's memory.
    """

    priority = "VERY_LOW"

    def __init__(self, planned: PlannedMemory) -> None:
        self._planned = planned
        self._updates, self._peak_mb = 0, 0.0

    def before_train(self, runner: Run) -> None:
        """Begin to look at updates."""
        device = runner.strategy.device
        if not counts_memory(device):
            runner.logger.info(f"Memory is not compared with the plan: torch does not count it on {device}")
            return
        self._updates, self._peak_mb = 0, 0.0
        # As attributes, which are taken away again: then no update calls them any more.
        self.before_train_iter = self._begin  # type: ignore[method-assign]
        self.after_train_iter = self._end  # type: ignore[method-assign]
        runner.hook_calls.refresh()

    def after_train(self, runner: Run) -> None:
        """Compare after fewer updates, if there were no more."""
        if "after_train_iter" in vars(self):
            self._compare(runner)

    def _begin(self, runner: Run, batch_idx: int, data_batch: Any = None) -> None:
        self._updates += 1
        if self._updates >= _FROM:
            begin_peak(runner.strategy.device)

    def _end(
        self, runner: Run, batch_idx: int, data_batch: Any = None, outputs: Mapping[str, Any] | None = None
    ) -> None:
        if self._updates >= _FROM:
            self._peak_mb = max(self._peak_mb, memory_mb(runner.strategy.device))
        if self._updates == _TO:
            self._compare(runner)

    def _compare(self, runner: Run) -> None:
        del self.before_train_iter, self.after_train_iter
        runner.hook_calls.refresh()
        if self._updates < _FROM:
            runner.logger.info(
                f"Memory is not compared with the plan: training ended before update {_FROM}, the first ones are not as "
                "all others"
            )
            return
        measured = all_gather(torch.tensor(self._peak_mb, dtype=torch.float64, device="cpu"))
        if runner.rank == 0:
            self._say(runner, [float(value) * _MIB for value in measured])

    def _say(self, runner: Run, measured: list[float]) -> None:
        differences = [value / self._planned.of(rank).total - 1 for rank, value in enumerate(measured)]
        rank = max(range(len(measured)), key=lambda each: abs(differences[each]))
        planned, difference = self._planned.of(rank), differences[rank]
        kind, most = max(planned.by_kind.items(), key=lambda item: item[1])
        of = f" on rank {rank}, which differs most" if len(measured) > 1 else ""
        line = (
            f"{measured[rank] / _MIB:,.1f} MiB at the peak of updates {_FROM} to {self._updates}{of}, planned for "
            f"{self._planned.name}: {planned.total / _MIB:,.1f} MiB ({difference:+.1%}), most of it "
            f"{kind.replace('_', ' ')}, {most / _MIB:,.1f} MiB"
        )
        if abs(difference) > TOLERANCE:
            runner.logger.warning(f"Memory differs from the plan by more than {TOLERANCE:.0%}: {line}")
        else:
            runner.logger.info(f"Memory is as planned: {line}")


def planned_memory_hook(plan: str | Path | Mapping[str, Any] | None, strategy: Strategy) -> list[tuple[Hook, int]]:
    """Return the hook of a run that was given a plan, with its priority; a collective, rank 0 reads.

    Raises:
        ConfigError: see ``planned_memory``.
    """
    if plan is None:
        return []
    hook = PlannedMemoryHook(told_by_rank_0(lambda: planned_memory(plan, strategy)))
    return [(hook, get_priority(hook.priority))]
