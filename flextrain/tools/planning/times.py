"""What a plan says of time, as plain values that JSON can hold; see plan.py."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class PipelineOrder:
    """In which order the processes of a pipeline compute.

    Attributes:
        schedule: such as "1f1b".
        stages_per_process: number of stages that each process has.
    """

    schedule: str
    stages_per_process: int


@dataclass(frozen=True)
class StepTime:
    """How long an update takes on a machine, in seconds, as an interval: see docs/planning_time.md for what is assumed.

    Attributes:
        lower: if computing and sending overlap perfectly.
        upper: if nothing overlaps.
        computing: of ``lower``, computing on the process that has most of it, without waiting.
        waiting: of ``lower``, share of the time in which the processes of a pipeline wait for each other, in the mean.
        inside, between: sending inside of a node and between nodes, on the process that sends longest.
        utilisation: share of the machine's peak that forward and backward take, without recomputation, if the update takes
            ``upper`` and if it takes ``lower``: the model's FLOP utilisation.
        notes: what is not counted, one line each.
    """

    lower: float
    upper: float
    computing: float
    waiting: float
    inside: float
    between: float
    utilisation: tuple[float, float]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Calibration:
    """How much of a machine's figures for computing is reached, fitted to one measured update.

    Attributes:
        strategy: whose update was measured.
        world_size, nodes: of how many processes.
        seconds: what was measured.
        overlapped: the share of the peaks, if all sending overlapped in it; of ``StepTime.lower``.
        apart: the same if nothing did; of ``StepTime.upper``.
        source: where the seconds are from.
        notes: what to know about it, one line each.
    """

    strategy: str
    world_size: int
    nodes: int
    seconds: float
    overlapped: float
    apart: float
    source: str = ""
    notes: list[str] = field(default_factory=list)
