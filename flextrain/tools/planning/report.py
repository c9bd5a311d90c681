"""A plan as a table for people."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.console import Group
from rich.text import Text

from ..markup import add_row
from ..tables import FittedTable
from .plan import UNSEEN, RankPlan, StrategyPlan, TrainingPlan

_SHOWN = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer_state": "optimizer",
    "activations": "activations",
    "communication": "communication",
}

HEADINGS = ("strategy", "peak", *_SHOWN.values(), "other", "sent inside", "between", "TFLOP", "repeated", "fits")
"""Of the table's columns."""
CAPTION = "bytes per rank: memory at the peak, and sent to processes of its node and of other nodes"


def report(plan: TrainingPlan) -> Group:
    """Return what to print with rich: a table with a row for each strategy, and lines on each."""
    title = f"{Path(plan.script).name}: one update on {plan.world_size:,} processes, {plan.nodes:,} nodes"
    table = FittedTable(title=Text(title), title_justify="left", caption_justify="left")
    table.add_column(HEADINGS[0], overflow="fold")
    for heading in HEADINGS[1:]:
        table.add_column(heading, justify="right")
    for strategy in plan.strategies:
        add_row(table, strategy.strategy, *cells(plan, strategy))
    table.caption = Text(CAPTION)
    lines = [Text(line, style=style) for strategy in plan.strategies for line, style in lines_on(strategy)]
    lines.append(Text(not_seen(plan), style="dim"))
    return Group(table, *lines)


def not_seen(plan: TrainingPlan) -> str:
    """What no plan sees, and the room for it."""
    margin = f", for which {size(plan.unseen)} are left free" if plan.unseen else ""
    return f"Not seen: {UNSEEN}{margin}."


def cells(plan: TrainingPlan, strategy: StrategyPlan) -> list[str]:
    """A strategy's row of the table, but for its name."""
    rank = strategy.highest
    if rank is None:
        return ["refused"] + [""] * (len(_SHOWN) + 6)
    by_kind = rank.peak.by_kind
    known = [by_kind.get(kind, 0) for kind in _SHOWN]  # type: ignore[call-overload]
    fits = plan.fits(strategy)
    return [
        size(rank.peak.total),
        *map(size, known),
        size(rank.peak.total - sum(known)),
        size(max(one.sent("inside") for one in strategy.ranks)),
        size(max(one.sent("between") for one in strategy.ranks)),
        f"{max(one.flops for one in strategy.ranks) / 1e12:.4g}",
        f"{max(one.repeated_flops for one in strategy.ranks) / 1e12:.4g}",
        "" if fits is None else "yes" if fits else "no",
    ]


def lines_on(strategy: StrategyPlan) -> Iterator[tuple[str, str]]:
    """What to say of a strategy below the table: lines, and their styles for rich."""
    name, rank = strategy.strategy, strategy.highest
    if rank is None:
        yield f"{name}: {strategy.message}", "red"
        return
    yield f"{name}: the peak is in {where_it_is(rank)}", "dim"
    for note in strategy.notes:
        yield f"{name}: {note}", "dim"


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
