"""PlannedMemoryHook: compares the memory of a run with a plan of it, once."""

from __future__ import annotations

import sys
import sysconfig
from bisect import bisect_right
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..core.base.config import validate
from ..core.base.errors import ConfigError, one_of
from ..core.base.registry import HOOKS, STRATEGIES
from ..core.comm.agreement import told_by_rank_0
from ..core.comm.collectives import all_gather
from ..core.device.device import begin_peak, counts_memory, memory_mb
from ..runner.hooks.hook import Hook
from ..strategies.base import Strategy
from .plan import Moment, StrategyPlan, TrainingPlan, read_plan

if TYPE_CHECKING:
    from ..runner.run import Run

# Find in a plan of `flextrain plan` what it says of this run: the memory that each of its ranks needs.


_WHERE = "env_cfg.plan"
_OF_THE_MACHINE = ("type", "device", "launcher", "backend", "timeout_s", "compile")
"""Options of a strategy of which memory does not depend, or that no plan has."""
_INSTALLED = {"site-packages", "dist-packages"}
_HOME = Path(__file__).resolve().parents[1]


class PlannedMemory:
    """The peak of each rank as it was planned.

    Args:
        name: the strategy's name in the plan.
        peaks: the peaks of the planned ranks, by rank. A rank between two of them is as the lower one: they are one of each
            pipeline stage, and of many stages the first, the second and the last.
    """

    def __init__(self, name: str, peaks: Mapping[int, Moment]) -> None:
        self.name = name
        self._ranks = sorted(peaks)
        self._peaks = peaks

    def of(self, rank: int) -> Moment:
        """The planned peak of a rank."""
        return self._peaks[self._ranks[max(bisect_right(self._ranks, rank) - 1, 0)]]


def planned_memory(given: str | Path | Mapping[str, Any], strategy: Strategy) -> PlannedMemory:
    """Return what a plan says of this run.

    Args:
        given: a file that ``flextrain plan --json`` has written, or what is in it.
        strategy: the strategy of this run, which has joined its process group.

    Raises:
        ConfigError: it is no plan, or one of another script, number of processes or strategy.
    """
    plan = read_plan(given, _WHERE)
    size = strategy.topology.world_size
    if plan.world_size != size:
        raise ConfigError(f"{_WHERE}: is for a world size of {plan.world_size:,} and this run has {size:,}; plan again")
    script = _script()
    if script is not None and Path(plan.script).name != script.name:
        raise ConfigError(f"{_WHERE}: is for {Path(plan.script).name} and this is {script.name}; plan again")
    found = _of_strategy(plan, strategy)
    return PlannedMemory(found.strategy, {each.rank: each.peak for each in found.ranks})


def _script() -> Path | None:
    """The user's script that runs; None if it is a program such as pytest or a worker of Ray, which has imported it."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if file is None:
        return None
    path = Path(file).resolve()
    homes = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "scripts")]
    is_installed = not _INSTALLED.isdisjoint(path.parts) or any(path.is_relative_to(home) for home in (*homes, _HOME))
    return None if is_installed else path


def _of_strategy(plan: TrainingPlan, strategy: Strategy) -> StrategyPlan:
    kind, axes = type(strategy).__name__, _axes_of(strategy)
    same = [
        one for one in plan.strategies if one.ranks and one.options.get("type") == kind and _several(one.axes) == axes
    ]
    if not same:
        for one in plan.strategies:
            if one.status != "planned" and _is_asked_for(one.strategy, strategy):
                raise ConfigError(f'{_WHERE}: "{one.strategy}" was refused there: {one.message}')
        names = one_of(f'"{one.strategy}"' for one in plan.strategies) if plan.strategies else "no strategy"
        sizes = "".join(f", {axis}={size}" for axis, size in axes.items())
        raise ConfigError(f"{_WHERE}: has {names}, and this run has {kind}{sizes}; plan it too")
    differences = [_difference(one, strategy) for one in same]
    if all(differences):
        raise ConfigError(f'{_WHERE}: "{same[0].strategy}" there has another strategy.{differences[0]}; plan again')
    return same[differences.index("")]


def _axes_of(strategy: Strategy) -> dict[str, int]:
    return {axis: size for axis, (_, size) in strategy.topology.axes.items() if size > 1}


def _several(axes: Mapping[str, int]) -> dict[str, int]:
    """The axes of a plan with several processes, without the one of strategies that have no mesh."""
    return {axis: size for axis, size in axes.items() if size > 1 and axis != "data"}


def _is_asked_for(name: str, strategy: Strategy) -> bool:
    """Whether a name in a plan, of which nothing else is known, is that of this run's strategy."""
    try:
        spec = dict(STRATEGIES.expand(name, _WHERE))
        kind = STRATEGIES.resolve(spec.pop("type"), _WHERE)
    except ConfigError:
        return False
    return kind is type(strategy) and all(getattr(strategy.config, key, None) == value for key, value in spec.items())


def _difference(planned: StrategyPlan, strategy: Strategy) -> str:
    """Say which option of the strategy is another one in the plan; empty if none is, or the plan has one only in words."""
    options = {key: value for key, value in planned.options.items() if key not in _OF_THE_MACHINE}
    try:
        there = validate(type(strategy.config), options, "strategy")
    except ConfigError:  # a function or a class of the user's, which the plan has by name
        return ""
    for key in type(strategy.config).model_fields:
        a, b = getattr(there, key), getattr(strategy.config, key)
        if key not in _OF_THE_MACHINE and a != b:
            return f"{key}, {a!r} and here {b!r}"
    return ""


TOLERANCE = 0.1
"""Difference from the plan, as a share of it, beyond which the log warns."""
_FROM, _TO = 3, 5
_MIB = 2**20


class PlannedMemoryHook(Hook):
    """Measures the peak of the third to the fifth update of this process, and logs it beside the plan's.

    The first updates create the optimizer's state. Afterwards the hook is no longer called. The log line tells of the rank
    that differs most. The peak in log lines counts from then on anew.

    Args:
        plan: see ``planned_memory``; rank 0 reads it.
        strategy: the strategy of the run.
    """

    priority = "VERY_LOW"

    def __init__(self, plan: str | Path | dict[str, Any], strategy: Strategy) -> None:
        self._planned: PlannedMemory = told_by_rank_0(lambda: planned_memory(plan, strategy))
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


# A lookup, not a registration: ``env_cfg.plan`` is the way to it.
HOOKS.add_lookup({"plan": PlannedMemoryHook}.get)
