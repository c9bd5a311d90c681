"""A plan as one HTML file, which needs no network: a table, charts of memory and of bytes sent, and what to know of them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ..core.base.errors import counted
from ..pages import INK, PAPER, SOFT, check_file, drawing, legend_of, whole_page, write_file
from ..runner.reporting.reporter import import_extra
from .plan import KINDS, Kind, Link, Moment, RankPlan, StrategyPlan, TrainingPlan
from .report import CAPTION, about_times, cells, headings, interval, lines_on, not_seen, size, where_it_is

# The charts of a plan's page, as SVG for HTML.
#
# Matplotlib draws them. Colours of text and lines become variables of the page's style, for light and dark screens;
# widths are those of the page, on a phone a chart shrinks.


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


_KIND_WORDS: dict[Kind, str] = {
    "optimizer_state": "optimizer state",
    "communication": "communication (gathered parameters, buffers of collectives)",
    "temporary": "temporary (gradients of activations, and the like)",
}
_LINK_WORDS = {"inside": "to processes of the same node", "between": "to other nodes"}
_LONG = 40  # letters of a name


def check_page(path: str | Path, where: str = "plan.html") -> None:
    """Check, before anything is planned, that a page can be written.

    Raises:
        ConfigError: its folder does not exist or cannot be written to, ``path`` is a folder, or the package that draws is
            missing.
    """
    check_file(Path(path), where)
    check_charts(where)


def write_page(plan: TrainingPlan, path: str | Path) -> None:
    """Write the page; there is never a part of it under this name.

    Raises:
        ConfigError: see ``check_page``.
        CheckpointError: the storage failed.
    """
    check_page(path)
    write_file(Path(path), page(plan))


def page(plan: TrainingPlan) -> str:
    """Return the page of a plan."""
    pair = "".join(filter(None, (_memory_at_peak(plan), _sent(plan), _times(plan))))
    sections = (
        _heading(plan),
        _table(plan),
        f'<div class="pair">{pair}</div>' if pair else "",
        _memory_over_updates(plan),
        _remarks(plan),
        _every_collective(plan),
    )
    return whole_page(f"Plan of {Path(plan.script).name}", sections)


def _heading(plan: TrainingPlan) -> str:
    facts = {
        "script": plan.script,
        "processes": f"{plan.world_size:,}",
        "nodes": f"{plan.nodes:,}",
        "device memory": "not given" if plan.device_memory is None else size(plan.device_memory),
        "torch": plan.torch,
    }
    if plan.arguments:
        facts = {"script": facts["script"], "its arguments": shlex.join(plan.arguments), **facts}
    if plan.machine is not None:
        facts["machine"] = plan.machine.device
    items = "".join(f"<div><dt>{escape(key)}</dt><dd>{escape(value)}</dd></div>" for key, value in facts.items())
    return f"<header><h1>{escape(Path(plan.script).name)}</h1><p>{_verdict(plan)}</p><dl>{items}</dl></header>"


def _verdict(plan: TrainingPlan) -> str:
    """What the plan says in one sentence."""
    of = f"of {counted(len(plan.strategies), 'strategy', 'strategies')}"
    refused = sum(one.status == "refused" for one in plan.strategies)
    found = [f"{refused} {of} refused"] if refused else []
    if plan.device_memory is not None:
        fitting = sum(plan.fits(one) is True for one in plan.strategies)
        found.insert(0, f"{fitting} {of} {'fits' if fitting == 1 else 'fit'} on the device")
    return f"One update of one rank. {'; '.join(found)}".strip()


def _table(plan: TrainingPlan) -> str:
    head = "".join(f"<th scope=col>{escape(heading)}</th>" for heading in headings(plan))
    rows = "".join(_row(plan, strategy) for strategy in plan.strategies)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return f'<section><div class="wide">{table}</div><p class="small">{escape(CAPTION)}</p></section>'


def _row(plan: TrainingPlan, strategy: StrategyPlan) -> str:
    verdict = {True: "yes", False: "no", None: strategy.status}[plan.fits(strategy)]
    names = headings(plan)[1:]
    kinds = [' class="fits"' if name == "fits" else "" for name in names]
    body = "".join(f"<td{kind}>{escape(cell)}</td>" for kind, cell in zip(kinds, cells(plan, strategy), strict=True))
    return f'<tr class="{verdict}"><th scope=row>{_name(strategy)}</th>{body}</tr>'


def _name(strategy: StrategyPlan) -> str:
    """A strategy's name, which breaks only if it is long."""
    kind = ' class="long"' if len(strategy.strategy) > _LONG else ""
    return f"<span{kind}>{escape(strategy.strategy)}</span>"


def _planned(plan: TrainingPlan) -> list[tuple[StrategyPlan, RankPlan]]:
    return [(one, rank) for one in plan.strategies if (rank := one.highest) is not None]


def _kinds(moments: Iterable[Moment], words: Mapping[Kind, str]) -> str:
    """The legend of the kinds of memory that there are."""
    there = {kind for moment in moments for kind, count in moment.by_kind.items() if count}
    return legend_of(
        (KIND_COLOURS[kind], words.get(kind, kind.replace("_", " "))) for kind in KIND_COLOURS if kind in there
    )


def _memory_at_peak(plan: TrainingPlan) -> str:
    planned = _planned(plan)
    if not planned:
        return ""
    legend = _kinds((rank.peak for _, rank in planned), _KIND_WORDS)
    chart = f"<figure>{memory_at_peak(plan, size)}<figcaption>{_of_the_device(plan)}</figcaption></figure>"
    return f"<section><h2>Memory at the peak</h2>{legend}{chart}</section>"


def _of_the_device(plan: TrainingPlan) -> str:
    if plan.device_memory is None:
        return "The device's memory was not given (--device-memory)."
    where = "is the vertical line" if device_is_drawn(plan) else "lies far to the right"
    free = f"; {size(plan.unseen)} of it are left free for what is not seen" if plan.unseen else ""
    return f"The device's memory of {size(plan.device_memory)} {where}{free}."


def _memory_over_updates(plan: TrainingPlan) -> str:
    drawn = [(strategy, rank) for strategy, rank in _planned(plan) if rank.moments]
    if not drawn:
        return ""
    legend = _kinds((moment for _, rank in drawn for moment in rank.moments), {})
    charts = "".join(_memory_over_update(plan, *each) for each in drawn)
    text = "Each chart has a scale of its own. The triangle is the peak."
    if plan.device_memory is not None and any(rank.peak.total >= plan.device_memory for _, rank in drawn):
        text += " The horizontal line is the device's memory."
    return f'<section><h2>Memory over the update</h2>{legend}<p class="small">{text}</p><div class="grid">{charts}</div></section>'


def _memory_over_update(plan: TrainingPlan, strategy: StrategyPlan, rank: RankPlan) -> str:
    at = where_it_is(rank)
    if highest_of(rank) is None:
        at += "; not in the update that is drawn, but in the one before, which creates the optimizer's state"
    caption = f"<strong>{size(rank.peak.total)}</strong> in {escape(at)}"
    chart = memory_over_update(rank, strategy.strategy, plan.device_memory)
    return f"<figure><h3>{escape(strategy.strategy)}</h3>{chart}<figcaption>{caption}</figcaption></figure>"


def _sent(plan: TrainingPlan) -> str:
    sending = [strategy for strategy in plan.strategies if sent_by_axis(strategy)]
    if not sending:
        return ""
    legend = legend_of((colour, _LINK_WORDS[link]) for link, colour in LINK_COLOURS.items())
    caption = "By axis of the mesh, from the planned rank that sends most. Messages go in a ring."
    chart = f"<figure>{bytes_sent(sending, size)}<figcaption>{caption}</figcaption></figure>"
    return f"<section><h2>Bytes sent in an update</h2>{legend}{chart}</section>"


def _times(plan: TrainingPlan) -> str:
    if all(one.time is None for one in plan.strategies):
        return ""
    words = {"least": "if computing and sending overlap perfectly", "most": "more, if nothing overlaps"}
    legend = legend_of((colour, words[part]) for part, (colour, _) in TIME_COLOURS.items())
    caption = " ".join(f"{escape(line)}" for line in about_times(plan))
    return f"<section><h2>Time of a step</h2>{legend}<figure>{time_of_a_step(plan, interval)}<figcaption>{caption}</figcaption></figure></section>"


def _every_collective(plan: TrainingPlan) -> str:
    rows = "".join(_collectives(strategy) for strategy in plan.strategies)
    if not rows:
        return ""
    heads = ("strategy", "collective", "axis", "ranks", "phase", "calls", "whole tensors", "sent inside", "between")
    head = "".join(f"<th scope=col>{heading}</th>" for heading in heads)
    table = f'<div class="wide"><table class="many"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    return f"<section><details><summary>Every collective of an update</summary>{table}</details></section>"


def _collectives(strategy: StrategyPlan) -> str:
    rank = busiest_of(strategy)
    found = []
    for traffic in rank.traffic if rank is not None else ():
        texts = (
            *(traffic.collective, traffic.axis, f"{traffic.ranks:,}", traffic.phase),
            *(f"{traffic.count:,}", size(traffic.payload), size(traffic.inside), size(traffic.between)),
        )
        tds = "".join(f"<td>{escape(text)}</td>" for text in texts)
        found.append(f"<tr><th scope=row>{_name(strategy)}</th>{tds}</tr>")
    return "".join(found)


def _remarks(plan: TrainingPlan) -> str:
    found = []
    for strategy in plan.strategies:
        kind = ' class="refused"' if strategy.status == "refused" else ""
        for line, _ in lines_on(strategy):
            rest = line.removeprefix(f"{strategy.strategy}: ")
            found.append(f"<li{kind}><strong>{escape(strategy.strategy)}:</strong> {escape(rest)}</li>")
    found += [f"<li>{escape(note)}</li>" for note in plan.notes]
    found += [f"<li>{escape(line)}</li>" for line in (not_seen(plan), *about_times(plan))]
    return f'<section><h2>What to know</h2><ul class="remarks">{"".join(found)}</ul></section>'
