"""Schedules: the order in which each process of a pipeline runs forwards and backwards of stages and micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ....core.base.errors import StrategyError

Kind = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """One piece of work of a process.

    Attributes:
        kind: "F" forward; "B" backward; "I" backward to the stage's input only, and "W" to its weights, later.
        stage: number of the stage, over all processes.
        micro_batch: index in the window.
    """

    kind: Kind
    stage: int
    micro_batch: int


@dataclass(frozen=True)
class Schedule:
    """A way to order the work of a window.

    Attributes:
        stages_per_process: numbers that are allowed, the first is the default; 0 at the end: any larger one too.
        is_v: the first and the last stage are on the first process, the stages between go to the last one and back.
        splits_backward: whether gradients of weights are computed apart from those of inputs, to fill idle times.
        order: from (number of processes, stages per process, micro-batches) the order of every process.
    """

    stages_per_process: Sequence[int]
    is_v: bool
    splits_backward: bool
    order: Callable[[int, int, int], list[list[Action]]]

    def process_of(self, stage: int, processes: int) -> int:
        """Return the process, by its index along the pipeline, that has a stage."""
        turn, index = divmod(stage, processes)
        return processes - 1 - index if self.is_v and turn % 2 else index

    def stages_of(self, process: int, processes: int, each: int) -> list[int]:
        """Return the stages of a process, in their order."""
        return [stage for stage in range(processes * each) if self.process_of(stage, processes) == process]


def _gpipe(processes: int, each: int, micro_batches: int) -> list[list[Action]]:
    """All forwards, then all backwards. Source: Huang et al., GPipe, 2019."""
    several = range(micro_batches)
    return [
        [Action("F", rank, i) for i in several] + [Action("B", rank, i) for i in several] for rank in range(processes)
    ]


def _one_forward_one_backward(processes: int, each: int, micro_batches: int) -> list[list[Action]]:
    """As few forwards ahead of their backward as keep every process busy. Source: Narayanan et al., PipeDream, 2019."""
    return [
        _alternating(
            [Action("F", rank, i) for i in range(micro_batches)],
            [Action("B", rank, i) for i in range(micro_batches)],
            processes - rank - 1,
        )
        for rank in range(processes)
    ]


def _interleaved(processes: int, each: int, micro_batches: int) -> list[list[Action]]:
    """Several stages for each process, in turn for groups of micro-batches. Source: Narayanan et al., Megatron-LM, 2021."""
    groups = [range(start, min(start + processes, micro_batches)) for start in range(0, micro_batches, processes)]
    found = []
    for rank in range(processes):
        stages = [turn * processes + rank for turn in range(each)]
        forwards = [Action("F", stage, i) for group in groups for stage in stages for i in group]
        backwards = [Action("B", stage, i) for group in groups for stage in reversed(stages) for i in group]
        found.append(_alternating(forwards, backwards, (processes - rank - 1) * 2 + (each - 1) * processes))
    return found


def _alternating(forwards: Sequence[Action], backwards: Sequence[Action], ahead: int) -> list[Action]:
    ahead = min(ahead, len(forwards))
    found = list(forwards[:ahead])
    for number, backward in enumerate(backwards):
        found += forwards[ahead + number : ahead + number + 1]
        found.append(backward)
    return found


def _zero_bubble(processes: int, each: int, micro_batches: int) -> list[list[Action]]:
    """Gradients of weights fill the times in which 1F1B waits. Source: Qi et al., Zero Bubble Pipeline Parallelism, 2024."""
    return _greedy([[rank + turn * processes for turn in range(each)] for rank in range(processes)], micro_batches)


def _v_shaped(processes: int, each: int, micro_batches: int) -> list[list[Action]]:
    """Zero bubble with the stages of a process from both ends, so that all need the same memory. Source: as above."""
    return _greedy([[rank, 2 * processes - 1 - rank] for rank in range(processes)], micro_batches)


def _greedy(stages: Sequence[Sequence[int]], micro_batches: int) -> list[list[Action]]:
    """Let every process take, at every tick, the first of: a gradient of inputs, a forward, a gradient of weights.

    A process holds at most as many activations as there are stages, as many as the first process does with 1F1B.
    """
    count = sum(len(own) for own in stages)
    done: set[Action] = set()
    orders: list[list[Action]] = [[] for _ in stages]
    held = [0] * len(stages)
    while any(len(order) < 3 * len(own) * micro_batches for order, own in zip(orders, stages, strict=True)):
        taken: list[tuple[int, Action]] = []
        for rank, own in enumerate(stages):
            ready = [a for a in _next(own, orders[rank], micro_batches) if needs(a, count) <= done]
            kinds = ("I", "F", "W") if held[rank] < count else ("I", "W")
            action = next((a for kind in kinds for a in ready if a.kind == kind), None)
            if action is not None:
                taken.append((rank, action))
        if not taken:
            raise AssertionError("a schedule of pipeline stages cannot go on")
        for rank, action in taken:
            orders[rank].append(action)
            held[rank] += {"F": 1, "I": 0, "W": -1, "B": -1}[action.kind]
            done.add(action)
    return orders


def _next(own: Sequence[int], order: Sequence[Action], micro_batches: int) -> Iterator[Action]:
    """The next action of every kind and stage, later stages first: their gradients are what others wait for."""
    for stage in reversed(own):
        for kind in ("I", "F", "W"):
            number = sum(action.kind == kind and action.stage == stage for action in order)
            if number < micro_batches:
                yield Action(kind, stage, number)


def needs(action: Action, count: int) -> set[Action]:
    """Return what has to be done, on any process, before an action of one of ``count`` stages.

    A backward may be "B" or "I"; the latter stands for both.
    """
    kind, stage, i = action
    if kind == "F":
        return {Action("F", stage - 1, i)} if stage else set()
    if kind == "W":
        return {Action("I", stage, i)}
    return {Action("F", stage, i)} | ({Action("I", stage + 1, i)} if stage + 1 < count else set())


SCHEDULES = {
    "gpipe": Schedule((1,), False, False, _gpipe),
    "1f1b": Schedule((1,), False, False, _one_forward_one_backward),
    "interleaved_1f1b": Schedule((2, 0), False, False, _interleaved),
    "zero_bubble": Schedule((1, 0), False, True, _zero_bubble),
    "zbv": Schedule((2,), True, True, _v_shaped),
}


def orders_of(name: str, processes: int, each: int, micro_batches: int) -> list[list[Action]]:
    """Return the order of every process, which was tried: no process waits for another one for ever.

    Raises:
        StrategyError: the schedule has no order for this number of micro-batches.
    """
    schedule = SCHEDULES[name]
    orders = schedule.order(processes, each, micro_batches)
    if not can_end(orders, processes * each):
        raise StrategyError(
            f"strategy.pp_schedule: {name} has no order for {micro_batches} micro-batches over {processes * each} stages; "
            "give accumulative_counts that pp divides, or choose 1f1b"
        )
    return orders


def can_end(orders: Sequence[Sequence[Action]], count: int) -> bool:
    """Return whether every action becomes possible if each process does its own in order."""
    done: set[Action] = set()
    at = [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while at[rank] < len(order) and needs(order[at[rank]], count) <= done:
                done |= {order[at[rank]], _as_input(order[at[rank]])}
                at[rank] += 1
                moved = True
    return all(number == len(order) for number, order in zip(at, orders, strict=True))


def _as_input(action: Action) -> Action:
    return action._replace(kind="I") if action.kind == "B" else action


Message = tuple[str, int, int]
"""("act" or "grad", stage that gets it, micro-batch)."""


def awaited(action: Action, count: int) -> Message | None:
    """Return the message that an action waits for."""
    kind, stage, i = action
    if kind == "F":
        return ("act", stage, i) if stage else None
    return ("grad", stage, i) if kind != "W" and stage + 1 < count else None


def sent(action: Action, count: int) -> Message | None:
    """Return the message that an action ends with."""
    kind, stage, i = action
    if kind == "F":
        return ("act", stage + 1, i) if stage + 1 < count else None
    return ("grad", stage - 1, i) if kind != "W" and stage else None


@dataclass(frozen=True)
class Route:
    """The messages of a window between one process and the others.

    Attributes:
        process_of: the process of every stage.
        expected: by kind and source, what the process gets, in the order in which it is sent.
        arrived: for some of these messages, those of the process itself that its source had received before it sent it.
        lines: kind, source and target of the messages of all processes; each once, on all processes in the same order.
    """

    process_of: Sequence[int]
    expected: Mapping[tuple[str, int], Sequence[Message]]
    arrived: Mapping[Message, Sequence[Message]]
    lines: Sequence[tuple[str, int, int]]


def route_of(orders: Sequence[Sequence[Action]], process_of: Sequence[int], own: int) -> Route:
    """Return the messages of process ``own``; ``orders`` has what every process does."""
    expected: dict[tuple[str, int], list[Message]] = {}
    arrived: dict[Message, list[Message]] = {}
    count = len(process_of)
    lines = {
        (message[0], source, process_of[message[1]])
        for source, order in enumerate(orders)
        for action in order
        if (message := sent(action, count)) is not None and process_of[message[1]] != source
    }
    for source, order in enumerate(orders):
        if source == own:
            continue
        received: list[Message] = []
        for action in order:
            message = awaited(action, count)
            if message is not None and process_of[message[1] + (-1 if message[0] == "act" else 1)] == own:
                received.append(message)
            message = sent(action, count)
            if message is not None and process_of[message[1]] == own:
                expected.setdefault((message[0], source), []).append(message)
                if received:
                    arrived[message], received = received, []
    return Route(process_of, expected, arrived, sorted(lines))
