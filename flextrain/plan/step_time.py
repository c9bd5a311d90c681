"""How long an update takes: an interval from the planned work and traffic, and a machine's figures."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ..core.base.errors import ConfigError, one_of, suggest
from ..strategies.mesh.pipeline.orders import SCHEDULES, Action, needs, orders_of
from .machines import MachineKind, check_devices
from .plan import Calibration, Link, Phase, RankPlan, StepTime, StrategyPlan, Traffic, TrainingPlan, Work, read_plan

NOT_TIMED = (
    "launching kernels, the latency of messages, reductions inside of switches, copies of activations to the host and back, "
    "the dataloader, hooks, validation, saves"
)
"""What takes time besides, or less of it, and no step time counts."""


@dataclass(frozen=True)
class _Span:
    """Seconds of one phase on one process, if everything overlaps and if nothing does."""

    lower: float = 0.0
    upper: float = 0.0

    def __add__(self, other: _Span) -> _Span:
        return _Span(self.lower + other.lower, self.upper + other.upper)


def step_time(plan: StrategyPlan, machine: MachineKind, overlapped: float = 1.0, apart: float = 1.0) -> StepTime | None:
    """Return how long an update of a planned strategy takes on a machine; None if nothing is known of its work.

    Args:
        overlapped, apart: the share of the machine's figures for computing that is reached, for ``StepTime.lower`` and
            for ``StepTime.upper``.
    """
    if not any(rank.work for rank in plan.ranks):
        return None
    processes = [_Process(rank, machine, overlapped, apart) for rank in _along_the_pipeline(plan)]
    waiting = 0.0
    order, notes = plan.pipeline, sorted({note for process in processes for note in process.notes})
    if len(processes) > 1 and order is not None and order.schedule in SCHEDULES:
        ends, waiting = _pipelined(order.schedule, order.stages_per_process, processes, lambda span: span.lower)
        lower = max(end + process.update.lower for end, process in zip(ends, processes, strict=True))
        ends, _ = _pipelined(order.schedule, order.stages_per_process, processes, lambda span: span.upper, apart=True)
        upper = max(ends) + max(process.update.upper + process.sending("update").upper for process in processes)
    else:
        if len(processes) > 1:
            notes.append("the order of the pipeline is not known: waiting for other stages is not counted")
        lower = max(process.computing.lower for process in processes)
        upper = max(process.computing.upper + process.sending().upper for process in processes)
    inside = max(process.seconds_sent("inside") for process in processes)
    between = max(process.seconds_sent("between") for process in processes)
    lower, upper = sorted((max(lower, inside, between), upper))  # shares that were fitted may turn them around
    useful = sum(process.useful for process in processes) / len(processes)
    return StepTime(
        lower=lower,
        upper=upper,
        computing=max(process.computing.lower for process in processes),
        waiting=waiting,
        inside=inside,
        between=between,
        utilisation=(useful / upper, useful / lower) if lower else (0.0, 0.0),
        notes=notes,
    )


def _along_the_pipeline(plan: StrategyPlan) -> list[RankPlan]:
    """Return the plan of each process along the pipeline; those that were not planned are as the second one."""
    count = plan.axes.get("pp", 1)
    known = {rank.index.get("pp", 0): rank for rank in plan.ranks}
    if count == 1 or len(known) < 2:
        return list(plan.ranks)
    return [known.get(index, known[min(1, max(known))]) for index in range(count)]


class _Process:
    """The seconds of one process's update."""

    def __init__(self, rank: RankPlan, machine: MachineKind, overlapped: float, apart: float) -> None:
        self._machine, self._traffic = machine, rank.traffic
        self._shares = overlapped, apart
        self.micro_batches = rank.micro_batches
        self.notes: list[str] = []
        self.forward = self._of(rank.work, "forward")
        self.backward = self._of(rank.work, "backward", "recompute")
        self.update = self._of(rank.work, "update", "setup")
        self.computing = self.forward + self.backward + self.update
        useful = (work for work in rank.work if work.phase in ("forward", "backward"))
        self.useful = sum(work.flops / rate for work in useful if (rate := machine.rate(work.dtype)))

    def _of(self, work: Iterable[Work], *phases: Phase) -> _Span:
        return sum((self._row(row) for row in work if row.phase in phases), _Span())

    def _row(self, work: Work) -> _Span:
        """The roofline of operations that follow each other: between the longer one of both times, and both."""
        rate = self._machine.rate(work.dtype)
        if work.flops and rate is None:
            self.notes.append(
                f"{self._machine.name} has no figure for {work.dtype}, only what is read and written counts"
            )
        computing = work.flops / rate if rate else 0.0
        moving = work.moved / self._machine.bandwidth
        overlapped, apart = self._shares
        return _Span(max(computing, moving) / overlapped, (computing + moving) / apart)

    def seconds_sent(self, link: Link, *phases: Phase) -> float:
        """Seconds of all messages over one link, if they fill it."""
        chosen = (each for each in self._traffic if not phases or each.phase in phases)
        return sum((float(getattr(each, link)) / self._speed(each, link) for each in chosen), 0.0)

    def sending(self, *phases: Phase) -> _Span:
        """Seconds of the messages of some phases, or of all of them."""
        inside, between = self.seconds_sent("inside", *phases), self.seconds_sent("between", *phases)
        return _Span(max(inside, between), inside + between)

    def _speed(self, traffic: Traffic, link: Link) -> float:
        if link == "between":
            return self._machine.between.speed(traffic.ranks - 1)
        return self._machine.inside.speed(others_inside(traffic))


def others_inside(traffic: Traffic) -> int:
    """Return how many of the other processes of a collective are on the node, from the bytes that are sent to them."""
    whole = traffic.inside + traffic.between
    if not traffic.between or not traffic.inside:
        return max(1, traffic.ranks - 1)
    if traffic.collective == "all_to_all":  # each other process gets as much
        return max(1, round(traffic.inside / whole * (traffic.ranks - 1)))
    return max(1, round(whole / traffic.between) - 1)  # a ring leaves each node once


def _pipelined(
    schedule: str, each: int, processes: Sequence[_Process], choose: Callable[[_Span], float], *, apart: bool = False
) -> tuple[list[float], float]:
    """Return when each process has done its forwards and backwards, and the share of the time in which it waits, in the mean.

    Args:
        apart: sending is added to the process's own computing.
    """
    micro_batches = processes[0].micro_batches
    count = len(processes) * each
    durations: list[dict[str, float]] = []
    for process in processes:
        forward, backward = choose(process.forward), choose(process.backward)
        if apart:
            forward += process.sending("forward").upper
            backward += process.sending("backward", "recompute").upper
        parts = micro_batches * each
        half = backward / parts / 2  # gradients of inputs and of weights are about as many operations
        durations.append({"F": forward / parts, "B": backward / parts, "I": half, "W": half})
    ends = run_orders(_orders(schedule, len(processes), each, micro_batches), count, durations)
    busy = sum((one["F"] + one["B"]) * micro_batches * each for one in durations)
    last = max(ends)
    return ends, max(0.0, 1 - busy / (len(processes) * last)) if last else 0.0


@lru_cache(maxsize=16)
def _orders(schedule: str, processes: int, each: int, micro_batches: int) -> list[list[Action]]:
    return orders_of(schedule, processes, each, micro_batches)


def run_orders(orders: Sequence[Sequence[Action]], count: int, durations: Sequence[dict[str, float]]) -> list[float]:
    """Return when each process ends, if it does its actions in order and each as soon as what it needs is done.

    Args:
        orders: of every process, see ``orders_of``.
        count: number of stages.
        durations: seconds of an action by its kind, of every process.
    """
    done: dict[Action, float] = {}
    waiting: dict[Action, list[int]] = {}
    at, free = [0] * len(orders), [0.0] * len(orders)
    ready = [*range(len(orders))]
    while ready:
        process = ready.pop()
        while at[process] < len(orders[process]):
            action = orders[process][at[process]]
            needed = needs(action, count)
            missing = next((one for one in needed if one not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(process)
                break
            start = max([free[process], *(done[one] for one in needed)])
            free[process] = start + durations[process][action.kind]
            at[process] += 1
            for name in {action, action._replace(kind="I") if action.kind == "B" else action}:
                done[name] = free[process]
                ready += waiting.pop(name, [])
    return free


# Fit the times of a machine to one measured update: ``--calibrate``.


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

    def fitted(end: str) -> float:
        return _share(lambda share: float(getattr(step_time(strategy, machine, share, share), end)), seconds)

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
        fitted("lower"),
        1.0 if seconds < peak.upper else fitted("upper"),
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
