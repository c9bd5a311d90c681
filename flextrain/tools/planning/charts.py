"""The charts of a plan's page, as SVG for HTML.

Matplotlib draws them. Colours of text and lines become variables of the page's style, for light and dark screens; widths are
those of the page, on a phone a chart shrinks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ...runner.reporting.reporter import import_extra
from ..page_drawing import INK, PAPER, SOFT, drawing
from .plan import KINDS, Kind, Link, Moment, RankPlan, StrategyPlan, TrainingPlan

KIND_COLOURS: dict[Kind, str] = {
    "parameters": "#0072B2",
    "gradients": "#D55E00",
    "optimizer_state": "#009E73",
    "buffers": "#999999",
    "inputs": "#F0E442",
    "activations": "#E69F00",
    "communication": "#56B4E9",
    "temporary": "#CC79A7",
}
"""Colours that people with any colour vision can tell apart. Source: Okabe and Ito, "Color Universal Design", 2008."""
TIME_COLOURS = {"least": ("#4477AA", ""), "most": ("#88BBDD", "////")}
"""Colour and hatch of a step's time if all overlaps, and of what is added if nothing does."""
_SECONDS = (("seconds", 1.0), ("milliseconds", 1e3), ("microseconds", 1e6))
LINK_COLOURS: dict[Link, str] = {"inside": "#44AA99", "between": "#BB5566"}
_MOST_LETTERS = 50
_UNITS = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("bytes", 1))


def check_charts(needed_by: str) -> None:
    """Raise ConfigError if the package that draws is not installed."""
    import_extra("matplotlib.figure", "plots", needed_by)


def memory_at_peak(plan: TrainingPlan, size: Callable[[float], str]) -> str:
    """Bars of the memory at each strategy's peak, by kind, with a device's memory."""
    ranks = [(one.strategy, rank) for one in plan.strategies if (rank := one.highest) is not None]
    most = max(rank.peak.total for _, rank in ranks)
    device = plan.device_memory if device_is_drawn(plan) else None
    right = max(most, device or 0, 1)
    with drawing("Memory at the peak", 38 * len(ranks) + 8, below=36, right=84) as (axes, drawn):
        axes.set(ylim=(38 * len(ranks) + 8, 0), xlim=(0, right * 1.02), yticks=[])
        axes.set_xlabel(f"{_bytes_axis(axes.xaxis, right)} per rank", color=SOFT)
        for i, (name, rank) in enumerate(ranks):
            _bar(axes, 38 * i + 28, 16, ((rank.peak.by_kind.get(kind, 0), KIND_COLOURS[kind], "") for kind in KINDS))
            _beside(axes, 0, 38 * i + 15, shortened(name), weight="bold")
            _beside(axes, 1.02, 38 * i + 32, size(rank.peak.total))
        if device is not None:
            axes.axvspan(device - plan.unseen, device, color=SOFT, alpha=0.28, linewidth=0)
            axes.axvline(device, color=INK, linewidth=1.6)
    return drawn[0]


def device_is_drawn(plan: TrainingPlan) -> bool:
    """Whether a device's memory is known, and not so large that bars would be too small beside it."""
    most = max((rank.peak.total for one in plan.strategies if (rank := one.highest) is not None), default=0)
    return plan.device_memory is not None and plan.device_memory <= 4 * most


def memory_over_update(rank: RankPlan, name: str, device_memory: int | None) -> str:
    """Areas of the memory by kind over one update, with its phases and its peak."""
    moments = rank.moments
    kinds = [kind for kind in KINDS if any(moment.by_kind.get(kind, 0) for moment in moments)]
    top, last, at = max(rank.peak.total, 1), max(len(moments) - 1, 1), highest_of(rank)
    with drawing(f"Memory over the update, {name}", 170, below=22, left=52) as (axes, drawn):
        axes.set(xlim=(0, last), ylim=(0, top * 1.18), xticks=[])
        axes.set_ylabel(_bytes_axis(axes.yaxis, top), color=SOFT)
        axes.set_xlabel("operations of the update, in order", color=SOFT)
        layers = [[moment.by_kind.get(kind, 0) for moment in moments] for kind in kinds]
        colours = [KIND_COLOURS[kind] for kind in kinds]
        axes.stackplot(range(len(moments)), *layers, colors=colours, edgecolor=PAPER, linewidth=0.3)
        for phase, start, end in _phases(moments):
            axes.axvline(start, color=SOFT, linewidth=0.6, linestyle=(0, (3, 3)))
            if (end - start) / last > 0.0165 * len(phase):  # else there is no room for the word
                _say(axes, (start + end) / 2, top * 1.17, phase, ha="center", va="top", color=SOFT, fontsize=10)
        if device_memory is not None and device_memory <= top:
            axes.axhline(device_memory, color=INK, linewidth=1.6)
        if at is None:  # another update than this one has it
            axes.axhline(rank.peak.total, color=INK, linewidth=1, linestyle=(0, (5, 3)))
        else:
            axes.plot([at], [moments[at].total + top * 0.03], marker="v", color=INK, markersize=6, clip_on=False)
    return drawn[0]


def highest_of(rank: RankPlan) -> int | None:
    """The index of the peak in ``moments``; None if another update than theirs has it."""
    return next((i for i, moment in enumerate(rank.moments) if moment.total == rank.peak.total), None)


def bytes_sent(strategies: Sequence[StrategyPlan], size: Callable[[float], str]) -> str:
    """Bars of what a strategy sends in an update, by axis of the mesh and link; each one sends something."""
    sums = [(one.strategy, sent_by_axis(one)) for one in strategies]
    most = max(sum(links.values()) for _, by_axis in sums for links in by_axis.values())
    height = sum(24 + 24 * len(by_axis) for _, by_axis in sums) + 8
    with drawing("Bytes sent in an update", height, below=36, left=104, right=84) as (axes, drawn):
        axes.set(ylim=(height, 0), xlim=(0, most * 1.02), yticks=[])
        axes.set_xlabel(f"{_bytes_axis(axes.xaxis, most)} per rank and update", color=SOFT)
        at = 0
        for name, by_axis in sums:
            _beside(axes, -0.39, at + 18, shortened(name), weight="bold")
            at += 24
            for axis, links in by_axis.items():
                hatches = {"inside": "", "between": "////"}
                _bar(axes, at + 12, 13, ((count, LINK_COLOURS[link], hatches[link]) for link, count in links.items()))
                _beside(axes, -0.025, at + 16, shortened(axis, 15), ha="right")
                _beside(axes, 1.02, at + 16, size(sum(links.values())))
                at += 24
    return drawn[0]


def time_of_a_step(plan: TrainingPlan, interval: Callable[[float, float], str]) -> str:
    """Bars of the seconds of an update: up to the lower end, and from there to the upper one; a strategy has a time."""
    times = [(f"{one.strategy}, {one.samples:,} samples", one.time) for one in plan.strategies if one.time is not None]
    most = max(time.upper for _, time in times)
    unit, factor = next(pair for pair in _SECONDS if most * pair[1] >= 1 or pair is _SECONDS[-1])
    with drawing("Time of a step", 38 * len(times) + 8, below=36, right=104) as (axes, drawn):
        axes.set(ylim=(38 * len(times) + 8, 0), xlim=(0, most * factor * 1.02), yticks=[])
        axes.set_xlabel(f"{unit} per update", color=SOFT)
        for i, (name, time) in enumerate(times):
            _beside(axes, 0, 38 * i + 15, shortened(name), weight="bold")
            for begin, end, part in ((0.0, time.lower, "least"), (time.lower, time.upper, "most")):
                colour, hatch = TIME_COLOURS[part]
                axes.barh(
                    38 * i + 28, (end - begin) * factor, 16, begin * factor,
                    color=colour, edgecolor=PAPER, linewidth=0, hatch=hatch,
                )  # fmt: skip
            _beside(axes, 1.02, 38 * i + 32, interval(time.lower, time.upper))
    return drawn[0]


def busiest_of(strategy: StrategyPlan) -> RankPlan | None:
    """The planned rank that sends most; None if the strategy was refused."""
    return max(strategy.ranks, key=lambda rank: rank.sent("inside") + rank.sent("between"), default=None)


def sent_by_axis(strategy: StrategyPlan) -> dict[str, dict[Link, int]]:
    """Bytes by axis and link of the planned rank that sends most."""
    found: dict[str, dict[Link, int]] = {}
    rank = busiest_of(strategy)
    for traffic in rank.traffic if rank is not None else ():
        links = found.setdefault(traffic.axis, {"inside": 0, "between": 0})
        links["inside"] += traffic.inside
        links["between"] += traffic.between
    return {axis: links for axis, links in found.items() if any(links.values())}


def shortened(name: str, most: int = _MOST_LETTERS) -> str:
    """A name of at most ``most`` letters, without its middle if it is longer."""
    name = re.sub(r"[\x00-\x1f\x7f]", " ", name)
    return name if len(name) <= most else f"{name[: most // 2]}…{name[-(most - most // 2 - 1) :]}"


# Parts of a chart


def _bytes_axis(axis: Any, most: float) -> str:
    """Put ticks at round numbers of a unit, and return the unit."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    unit, count = next(pair for pair in _UNITS if most >= pair[1] or pair[1] == 1)
    ticks = MaxNLocator(nbins=5, integer=unit == "bytes", steps=[1, 2, 2.5, 5, 10]).tick_values(0, most / count)
    axis.set_ticks([tick * count for tick in ticks if tick * count <= most * 1.02])
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / count:.4g}"))
    return unit


def _bar(axes: Any, y: float, height: float, parts: Iterable[tuple[int, str, str]]) -> None:
    """Draw a bar of parts beside each other, each of a length, a colour and a hatch."""
    left, seen = 0, axes.get_xlim()[1] / 100
    for count, colour, hatch in parts:
        if count:
            edge = 0.8 if count > seen else 0  # which would cover a narrow part
            axes.barh(y, count, height, left, color=colour, edgecolor=PAPER, linewidth=edge, hatch=hatch)
            left += count


def _beside(axes: Any, x: float, y: float, text: str, **style: Any) -> None:
    """Write at a height of the data, where 0 and 1 are the left and the right end of the axes."""
    _say(axes, x, y, text, transform=axes.get_yaxis_transform(), **style)


def _say(axes: Any, x: float, y: float, text: str, **style: Any) -> None:
    axes.text(x, y, text, parse_math=False, **{"color": INK, **style})


def _phases(moments: Sequence[Moment]) -> Iterator[tuple[str, int, int]]:
    """Yield each stretch of moments with one phase: its name, the first index, and that of the next stretch."""
    starts = [i for i, moment in enumerate(moments) if i == 0 or moments[i - 1].phase != moment.phase]
    for start, end in zip(starts, [*starts[1:], len(moments) - 1], strict=True):
        yield moments[start].phase, start, end
