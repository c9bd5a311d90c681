"""Fit the times of a machine to one measured update: ``--calibrate``."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from ...core.errors import ConfigError, one_of, suggest
from .machine_kind import MachineKind
from .machines import check_devices
from .plan import StrategyPlan, TrainingPlan, read_plan
from .step_time import step_time
from .times import Calibration

_WHERE = "plan.calibrate"
_FORM = "give STRATEGY=SECONDS or STRATEGY=scalars.json, such as ddp=1.84s, after PLAN.json: if another plan has it"
_HALVINGS = 50


@dataclass(frozen=True)
class Measured:
    """A measured update.

    Attributes:
        strategy: its name in the plan.
        seconds: of one update.
        source: where they are from.
        plan: the plan of the measured run; None: the one that is made.
    """

    strategy: str
    seconds: float
    source: str
    plan: TrainingPlan | None = None


def measured_in(text: str) -> Measured:
    """Read what ``--calibrate`` was given: ``[PLAN.json:]STRATEGY=SECONDS``, or a log file in place of the seconds.

    Raises:
        ConfigError: it is something else, or a file cannot be read.
    """
    before, colon, rest = text.partition(".json:")
    plan = read_plan(f"{before}.json") if colon else None
    name, _, value = (rest if colon else text).rpartition("=")
    if not name or not value:
        raise ConfigError(f'{_WHERE}: "{text}" is not allowed, {_FORM}')
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)\s*(m?)s?\s*", value)
    if found is not None:
        seconds, source = float(found[1]) * (1e-3 if found[2] else 1.0), value.strip()
    elif Path(value).suffix == ".json":
        seconds, source = _seconds_in_log(Path(value)), value
    else:
        raise ConfigError(f'{_WHERE}: "{value}" are no seconds and no log file scalars.json, {_FORM}')
    if not (seconds > 0 and math.isfinite(seconds)):
        raise ConfigError(f"{_WHERE}: {value} is not allowed, give more than 0 seconds")
    measured = Measured(name.strip(), seconds, source, plan)
    if plan is not None:
        strategy_in(plan.strategies, measured)
    return measured


def _seconds_in_log(path: Path) -> float:
    """The median over the lines of training, of the time without that for data; the first line has what happens once."""
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise ConfigError(f"{_WHERE}: {path} cannot be read, {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{_WHERE}: {path} is no log of scalars, {error}") from None
    times = [
        line["time"] - line.get("data_time", 0.0)
        for line in lines
        if isinstance(line, dict) and "iter" in line and isinstance(line.get("time"), (int, float))
    ]
    if len(times) < 2:
        raise ConfigError(f"{_WHERE}: {path} has {len(times)} lines of training with a time, 2 or more are needed")
    return float(statistics.median(times[1:]))


def strategy_in(strategies: Iterable[StrategyPlan], measured: Measured) -> StrategyPlan:
    """Return the planned strategy that was measured.

    Raises:
        ConfigError: it is not there, or was refused.
    """
    known = {one.strategy: one for one in strategies}
    if measured.strategy not in known:
        hint = suggest(measured.strategy, known)
        raise ConfigError(f'{_WHERE}: "{measured.strategy}" is not planned, choose {one_of(known)}{hint}')
    found = known[measured.strategy]
    if found.status == "refused":
        raise ConfigError(f"{_WHERE}: {found.strategy} is refused: {found.message}")
    return found


def fit(plan: TrainingPlan, machine: MachineKind, measured: Measured) -> Calibration:
    """Return the share of a machine's figures for computing with which an update takes as long as measured.

    There is one share for each end of the interval, because it is not known how much of the measured sending overlapped.
    Links keep their figures.

    Raises:
        ConfigError: the measured time is shorter than it can be on this machine.
    """
    known = measured.plan or plan
    strategy = strategy_in(known.strategies, measured)
    peak = step_time(strategy, machine)
    if peak is None:
        raise ConfigError(f"{_WHERE}: the work of {strategy.strategy} is not planned, give another strategy")
    seconds = measured.seconds
    if seconds < peak.lower:
        raise ConfigError(
            f"{_WHERE}: {seconds:.4g} s for {strategy.strategy} is less than the {peak.lower:.4g} s that {machine.name} takes at "
            f"its peak on {known.world_size:,} processes; check the unit, the machine and the plan"
        )

    def lower(share: float) -> float:
        found = step_time(strategy, machine, share, share)
        assert found is not None
        return found.lower

    def upper(share: float) -> float:
        found = step_time(strategy, machine, share, share)
        assert found is not None
        return found.upper

    notes = []
    if seconds < peak.upper:
        notes.append(
            f"{seconds:.4g} s is less than {peak.upper:.4g} s, which it takes at the peak without any overlap: the upper ends "
            "are not fitted"
        )
    return Calibration(
        strategy.strategy,
        known.world_size,
        known.nodes,
        seconds,
        _share(lower, seconds),
        1.0 if seconds < peak.upper else _share(upper, seconds),
        measured.source,
        notes,
    )


def _share(seconds_with: Callable[[float], float], seconds: float) -> float:
    """Return the share with which it takes this long; more is faster."""
    low, high = -60.0, 0.0  # the logarithm to base 2
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if seconds_with(2.0**middle) > seconds else (low, middle)
    return float(2.0**high)


def with_times(plan: TrainingPlan, machine: MachineKind, measured: Measured | None = None) -> TrainingPlan:
    """Return a plan with the time of each strategy's update on a machine, fitted to a measured one if there is one.

    Raises:
        ConfigError: a node has more processes than the machine has devices; or see ``fit``.
    """
    check_devices(machine, plan.world_size, plan.nodes)
    found = None if measured is None else fit(plan, machine, measured)
    shares = (1.0, 1.0) if found is None else (found.overlapped, found.apart)
    strategies = [dataclasses.replace(one, time=step_time(one, machine, *shares)) for one in plan.strategies]
    return dataclasses.replace(plan, strategies=strategies, machine=machine, calibration=found)
