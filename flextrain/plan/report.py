"""A plan as a table for people."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from rich.console import Group
from rich.text import Text

from ..tables import FittedTable, add_row
from .fit import SHOWN, lines_on_search
from .plan import UNSEEN, Advice, Calibration, RankPlan, StrategyPlan, TrainingPlan
from .step_time import NOT_TIMED

_SHOWN = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer_state": "optimizer",
    "activations": "activations",
    "communication": "communication",
}

_HEADINGS = (
    "strategy",
    "samples",
    "peak",
    *_SHOWN.values(),
    "other",
    "sent inside",
    "between",
    "TFLOP",
    "repeated",
    "fits",
)
CAPTION = "of one update: samples of all processes; bytes per rank, of memory at the peak and sent to its node and to other nodes"


def report(plan: TrainingPlan) -> Group:
    """Return what to print with rich: a table with a row for each strategy, and lines on each."""
    processes = f"{plan.world_size:,} process{'' if plan.world_size == 1 else 'es'}"
    title = f"{Path(plan.script).name}: one update on {processes}, {plan.nodes:,} node{'' if plan.nodes == 1 else 's'}"
    table = FittedTable(title=Text(title), title_justify="left", caption_justify="left")
    first, *others = headings(plan)
    table.add_column(first, overflow="fold")
    for heading in others:
        table.add_column(heading, justify="right")
    shown = plan.strategies if plan.search is None else plan.strategies[:SHOWN]
    for strategy in shown:
        add_row(table, strategy.strategy, *cells(plan, strategy))
    table.caption = Text(CAPTION)
    if plan.arguments:
        table.caption = Text(f"{CAPTION}\nthe script's arguments: {shlex.join(plan.arguments)}")
    lines = [Text(line, style=style) for strategy in shown for line, style in lines_on(strategy)]
    lines += [Text(line) for line in (*lines_on_search(plan), *plan.notes)]
    lines += [Text(line, style="dim") for line in (not_seen(plan), *about_times(plan))]
    return Group(table, *lines)


def headings(plan: TrainingPlan) -> tuple[str, ...]:
    """The headings of the table's columns."""
    return _HEADINGS if plan.machine is None else (*_HEADINGS, "step")


def not_seen(plan: TrainingPlan) -> str:
    """What no plan sees, and the room for it."""
    margin = f", for which {size(plan.unseen)} are left free" if plan.unseen else ""
    return f"Not seen: {UNSEEN}{margin}."


def cells(plan: TrainingPlan, strategy: StrategyPlan) -> list[str]:
    """A strategy's row of the table, but for its name."""
    rank = strategy.highest
    if rank is None:
        return ["", "refused"] + [""] * (len(headings(plan)) - 3)
    by_kind = rank.peak.by_kind
    known = [by_kind.get(kind, 0) for kind in _SHOWN]  # type: ignore[call-overload]
    fits = plan.fits(strategy)
    return [
        f"{strategy.samples:,}" if strategy.samples else "",
        size(rank.peak.total),
        *map(size, known),
        size(rank.peak.total - sum(known)),
        size(max(one.sent("inside") for one in strategy.ranks)),
        size(max(one.sent("between") for one in strategy.ranks)),
        f"{max(one.flops for one in strategy.ranks) / 1e12:.4g}",
        f"{max(one.repeated_flops for one in strategy.ranks) / 1e12:.4g}",
        "" if fits is None else "yes" if fits else "no",
        *(
            []
            if plan.machine is None
            else ["" if strategy.time is None else interval(strategy.time.lower, strategy.time.upper)]
        ),
    ]


def lines_on(strategy: StrategyPlan) -> Iterator[tuple[str, str]]:
    """What to say of a strategy below the table: lines, and their styles for rich."""
    name, rank = strategy.strategy, strategy.highest
    if rank is None:
        yield f"{name}: {strategy.message}", "red"
        return
    yield f"{name}: the peak is in {where_it_is(rank)}", "dim"
    if strategy.host:
        yield (
            f"{name}: offloaded activations have {size(strategy.host)} of the host's memory at most, for each process",
            "dim",
        )
    if (saved := strategy.checkpoint) is not None:
        took = "" if saved.seconds is None else f"; {saved.seconds:.3g} s"
        yield (
            f"{name}: a checkpoint has {size(saved.whole)} in {saved.files:,} files, {size(saved.index)} of them the index; rank "
            f"{saved.largest_rank} writes most, {size(saved.largest)}{took}",
            "dim",
        )
    for note in strategy.notes:
        yield f"{name}: {note}", "dim"
    if strategy.time is not None:
        yield from ((f"{name}: {line}", "dim") for line in _of_time(strategy))
    for advice in strategy.advice:
        yield f"{name}: {described(advice)}", "green" if advice.fits else "yellow"
    if strategy.advice and not strategy.advice[-1].fits:
        yield f"{name}: no change was found with which it fits", "yellow"


def _of_time(strategy: StrategyPlan) -> Iterator[str]:
    time = strategy.time
    assert time is not None
    sent = [f"sending {seconds(time.inside)} inside of nodes"] if time.inside else []
    sent += [f"sending {seconds(time.between)} between nodes"] if time.between else []
    waited = [f"processes wait for other stages {time.waiting:.0%} of it"] if time.waiting else []
    least, most = (f"{100 * share:.3g}" for share in time.utilisation)
    share = f"{least} %" if least == most else f"{least} to {most} %"
    parts = ", ".join([f"computing {seconds(time.computing)}", *sent, *waited])
    yield f"a step takes {interval(time.lower, time.upper)}: {parts}; {share} of the peak for the model's operations"
    yield from time.notes


def about_times(plan: TrainingPlan) -> Iterator[str]:
    """What the seconds of steps mean; nothing without a machine."""
    if plan.machine is None:
        return
    found = plan.calibration
    at = "at the full rates of its data sheet" if found is None else _calibrated(found)
    yield f"A step on {plan.machine.device}, {at}: from perfect overlap of computing and sending to none."
    yield f"Not in a step: {NOT_TIMED}."
    yield from found.notes if found is not None else ()


def _calibrated(found: Calibration) -> str:
    shares = sorted({f"{100 * share:.3g}" for share in (found.overlapped, found.apart)}, key=float)
    on = f"{found.strategy} in {seconds(found.seconds)} on {found.world_size:,} processes"
    return f"calibrated by {on} to {' to '.join(shares)} % of its rates for computing"


def described(advice: Advice) -> str:
    """A planned change for people: what to change, the new peak, and what it costs."""
    if advice.message:
        return f"with {advice.keys}: refused, {advice.message}"
    costs = [f"FLOP {_change(advice.flops)}"]
    if advice.sent is not None:
        costs.append(f"sent {_change(advice.sent)}")
    if advice.host:
        costs.append(f"on the host {size(advice.host)} per process")
    verdict = "fits" if advice.fits else "does not fit"
    return f"with {advice.keys}: {size(advice.peak)}, {verdict}; {', '.join(costs)}"


def _change(ratio: float) -> str:
    return f"{(ratio - 1) * 100:+.1f} %"


def where_it_is(rank: RankPlan) -> str:
    """The phase, module, operation and rank of a peak."""
    peak = rank.peak
    module = f" of {peak.module}" if peak.module else ""
    operation = f" ({peak.operation})" if peak.operation else ""
    at = "".join(f", {axis} {index}" for axis, index in rank.index.items() if axis == "pp")
    return f"{peak.phase}{module}{operation}, on rank {rank.rank}{at}"


def size(count: float) -> str:
    """A number of bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"


def seconds(count: float) -> str:
    """A number of seconds for people."""
    return interval(count, count)


def interval(lower: float, upper: float) -> str:
    """An interval of seconds for people, such as ``1.2 to 3.4 s``."""
    unit, factor = next(((u, f) for u, f in (("s", 1.0), ("ms", 1e3)) if upper * f >= 1), ("us", 1e6))
    first, last = (f"{n:.3g}" if n < 1000 else f"{n:,.0f}" for n in (lower * factor, upper * factor))
    return f"{last} {unit}" if first == last else f"{first} to {last} {unit}"
