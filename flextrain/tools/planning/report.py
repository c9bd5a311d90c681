"""A plan as a table for people."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.console import Group
from rich.text import Text

from ..markup import add_row
from ..tables import FittedTable
from .plan import UNSEEN, StrategyPlan, TrainingPlan

_SHOWN = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer_state": "optimizer",
    "activations": "activations",
    "communication": "communication",
}


def report(plan: TrainingPlan) -> Group:
    """Return what to print with rich: a table with a row for each strategy, and lines on each."""
    title = f"{Path(plan.script).name}: one update on {plan.world_size:,} processes, {plan.nodes:,} nodes"
    table = FittedTable(title=Text(title), title_justify="left", caption_justify="left")
    table.add_column("strategy", overflow="fold")
    for heading in ("peak", *_SHOWN.values(), "other", "sent inside", "between", "TFLOP", "repeated", "fits"):
        table.add_column(heading, justify="right")
    for strategy in plan.strategies:
        add_row(table, strategy.strategy, *_cells(plan, strategy))
    table.caption = Text("bytes per rank: memory at the peak, and sent to processes of its node and of other nodes")
    lines = [Text(line, style=style) for strategy in plan.strategies for line, style in _lines(strategy)]
    margin = f", for which {size(plan.unseen)} are left free" if plan.unseen else ""
    lines.append(Text(f"Not seen: {UNSEEN}{margin}.", style="dim"))
    return Group(table, *lines)


def _cells(plan: TrainingPlan, strategy: StrategyPlan) -> list[str]:
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


def _lines(strategy: StrategyPlan) -> Iterator[tuple[str, str]]:
    name, rank = strategy.strategy, strategy.highest
    if rank is None:
        yield f"{name}: {strategy.message}", "red"
        return
    peak = rank.peak
    where = f" of {peak.module}" if peak.module else ""
    at = "".join(f", {axis} {index}" for axis, index in rank.index.items() if axis == "pp")
    yield f"{name}: the peak is in {peak.phase}{where} ({peak.operation}), on rank {rank.rank}{at}", "dim"
    for note in strategy.notes:
        yield f"{name}: {note}", "dim"


def size(count: float) -> str:
    """A number of bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"
