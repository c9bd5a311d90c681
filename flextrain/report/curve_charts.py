"""The charts of a report, as SVG for HTML, with what a pointer shows of them."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import numpy as np
import numpy.typing as npt

from ..core.base.errors import ConfigError
from ..pages import SOFT, WIDTH, drawing
from ..runner.hooks.early_stopping import infer_rule
from .recorded_run import Curve, Mode, RecordedRun, RunEvent

# Which figures of runs a report shows, in which order, and what they are called.


SECTIONS = ("Metrics", "Loss", "Speed", "Learning rate", "Gradient norm", "Memory", "Other figures", "Your own scalars")
_COLUMNS = 300
"""Columns of a chart, each of which shows its smallest and its largest value."""


@dataclass
class Figure:
    """One figure of all runs that have it.

    Attributes:
        key: the mode and the name in the records.
        title, unit: for people.
        section: one of SECTIONS.
        curves: by the index of the run.
    """

    key: tuple[Mode, str]
    title: str
    unit: str
    section: str
    curves: dict[int, Curve] = field(default_factory=dict)

    @property
    def x_title(self) -> str:
        """What the horizontal axis counts."""
        return "step" if self.key[0] == "user" else "iteration"

    @property
    def is_constant(self) -> bool:
        """Whether every run has recorded the same value again and again."""
        return all(len(curve.ys) > 1 and len({*curve.ys}) == 1 for curve in self.curves.values())


def figures(runs: Sequence[RecordedRun]) -> list[Figure]:
    """Return the figures in the order of SECTIONS, within one as they were recorded."""
    found: dict[tuple[Mode, str], Figure] = {}
    for i, run in enumerate(runs):
        for curve in [*run.curves.values(), *_speeds(run)]:
            key = (curve.mode, curve.name)
            if key not in found:
                found[key] = Figure(key, *_described(curve))
            found[key].curves[i] = curve
    return sorted(found.values(), key=lambda figure: (SECTIONS.index(figure.section), *_last(figure)))


def _last(figure: Figure) -> tuple[bool, bool]:
    """What puts a figure behind others of its section: first comes the speed of training."""
    is_speed = figure.section == "Speed"
    return is_speed and figure.key[0] == "val", is_speed and not figure.unit.endswith("/s")


def _speeds(run: RecordedRun) -> Iterator[Curve]:
    """Yield samples or updates per second, from the recorded times of iterations."""
    times = run.curves.get(("train", "time"))
    if times is None:
        return
    each = run.samples
    rates = [(each or 1) / seconds if seconds > 0 else math.nan for seconds in times.ys]
    yield Curve("train", "samples per second" if each else "updates per second", times.xs, rates)


def _described(curve: Curve) -> tuple[str, str, str]:
    """The title, the unit and the section of a figure, by its name."""
    name, mode = curve.name, curve.mode
    last = name.rpartition("/")[2]
    if mode == "user":
        return name, "", "Your own scalars"
    if last in ("time", "data_time"):
        what = {"time": "time of an iteration", "data_time": "waiting for data, in an iteration"}[last]
        what = what if mode == "train" else f"{what}, validation"
        return what, "seconds", "Speed"
    if name in ("samples per second", "updates per second"):
        return name, f"{name.partition(' ')[0]}/s", "Speed"
    if last == "memory":
        return "largest memory so far", "MiB", "Memory"
    if mode == "val":
        return f"{name}, validation", "", "Loss" if "loss" in name else "Metrics"
    if last == "lr" or last.endswith((".lr", "_lr")):
        return name, "", "Learning rate"
    if "norm" in last:
        return name, "", "Gradient norm"
    return name, "", "Loss" if "loss" in name else "Other figures"


@dataclass(frozen=True)
class Final:
    """The values of a figure at its end.

    Attributes:
        last: the newest value that is finite; None: there is none.
        best: the best one, if the name of the figure says what is better.
        at: the iteration of the best one.
        nonfinite: number of values that are NaN or infinite.
    """

    last: float | None
    best: float | None
    at: float | None
    nonfinite: int


def final(figure: Figure, run: int) -> Final | None:
    """Return the final values of a run; None if it does not have the figure."""
    curve = figure.curves.get(run)
    if curve is None:
        return None
    points = [(x, y) for x, y in zip(curve.xs, curve.ys, strict=True) if math.isfinite(y)]
    nonfinite = len(curve.ys) - len(points)
    if not points:
        return Final(None, None, None, nonfinite)
    best = at = None
    if figure.section in ("Metrics", "Loss"):
        try:
            rule = infer_rule(figure.key[1], "")
        except ConfigError:
            rule = None
        if rule is not None:
            at, best = (max if rule == "greater" else min)(points, key=lambda point: point[1])
    return Final(points[-1][1], best, at, nonfinite)


def thinned(curve: Curve) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return a curve for drawing: of each of 300 columns the smallest and the largest value, and one that is not finite.

    A curve of few points stays as it is. The first and the last point are kept.
    """
    xs, ys = np.asarray(curve.xs, np.float64), np.asarray(curve.ys, np.float64)
    if len(xs) <= 2 * _COLUMNS:
        return xs, ys
    column = np.minimum((xs - xs[0]) / (xs[-1] - xs[0]) * _COLUMNS, _COLUMNS - 1).astype(np.int64)
    bounds = np.searchsorted(column, np.arange(_COLUMNS + 1))
    kept = {0, len(xs) - 1}
    finite = np.isfinite(ys)
    for start, stop in itertools.pairwise(bounds):
        own = np.flatnonzero(finite[start:stop]) + start
        if len(own):
            kept |= {int(own[np.argmin(ys[own])]), int(own[np.argmax(ys[own])])}
        if len(own) < stop - start:
            kept.add(int(np.flatnonzero(~finite[start:stop])[0] + start))
    index = np.array(sorted(kept))
    return xs[index], ys[index]


RUN_COLOURS = (
    ("#0072B2", "#4DB3F0"), ("#D55E00", "#FF9248"), ("#009E73", "#2FCB9C"), ("#A3388F", "#E58BD0"),
    ("#8A6D00", "#E3C230"), ("#5B5BD6", "#A3A3FF"), ("#B5283C", "#FF7A88"), ("#4B5A66", "#AEBCC8"),
)  # fmt: skip
"""Colours of the runs on light and on dark screens, after Okabe and Ito, "Color Universal Design", 2008; then they repeat,
with dashes."""
_HEIGHT, _BELOW, _LEFT, _RIGHT = 196, 36, 56, 10
_DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
_RANK_LINES = 8
_ENDS_BADLY = frozenset({"failed", "stalled", "preempted", "left", "gave_up"})
_FROM_ZERO = frozenset({"MiB", "seconds", "samples/s", "updates/s"})
"""Units whose axes begin with zero."""
_LOG_FROM = 100.0
"""The ratio of the largest to the smallest value from which on an axis is logarithmic, if all are above zero."""


def colour_of(run: int) -> str:
    """Return the variable of the page's style with a run's colour."""
    return f"var(--run-{run % len(RUN_COLOURS)})"


def chart(figure: Figure, runs: Sequence[RecordedRun], *, marks: bool) -> str:
    """Return the chart of a figure of all runs.

    Args:
        figure: the figure.
        runs: all runs of the report.
        marks: also mark checkpoints and warnings, beside interruptions and restarts.
    """
    several = len(figure.curves) > 1
    lines = [
        _Line(
            run,
            runs[run].name if several or len(runs) > 1 else "",
            curve,
            _DASHES[run // len(RUN_COLOURS) % len(_DASHES)],
            1.5
            + (1.3 * (len(figure.curves) - 1 - i) if len(figure.curves) <= 4 else 0),  # equal curves hide each other
        )
        for i, (run, curve) in enumerate(figure.curves.items())
    ]
    events = {run: runs[run].events for run in figure.curves} if figure.key[0] != "user" else {}
    return _drawn(figure.title, figure.unit, figure.x_title, lines, events, marks=marks)


def chart_of_ranks(name: str, unit: str, run: int, by_rank: Mapping[int, Curve]) -> str:
    """Return the chart of a figure that each rank of a run has measured; of many ranks those that differ most."""
    ranks = sorted(by_rank)
    if len(ranks) > _RANK_LINES:
        means = {rank: float(np.nanmean(by_rank[rank].ys or [math.nan])) for rank in ranks}
        order = sorted(ranks, key=lambda rank: means[rank])
        half = _RANK_LINES // 2
        ranks = sorted({*order[: half - 1], order[len(order) // 2], *order[-half:]})
    lines = [
        _Line(run, f"rank {rank}", by_rank[rank], _DASHES[i % len(_DASHES)], 1.4, 1 - 0.65 * (i // len(_DASHES)))
        for i, rank in enumerate(ranks)
    ]
    return _drawn(name, unit, "iteration", lines, {}, marks=False, names_at_end=True)


class _Line:
    def __init__(self, run: int, name: str, curve: Curve, dash: Any, width: float, alpha: float = 1.0) -> None:
        self.run, self.name, self.dash, self.width, self.alpha = run, name, dash, width, alpha
        self.xs, self.ys = thinned(curve)
        self.count = len(curve.xs)


def _drawn(
    title: str,
    unit: str,
    x_title: str,
    lines: Sequence[_Line],
    events: Mapping[int, Sequence[RunEvent]],
    *,
    marks: bool,
    names_at_end: bool = False,
) -> str:
    finite = np.concatenate([line.ys[np.isfinite(line.ys)] for line in lines])
    x_all = np.concatenate([line.xs for line in lines])
    left, right = float(x_all.min()), float(x_all.max())
    right = right if right > left else left + 1
    left = 0.0 if 0 < left < 0.1 * right else left
    is_log = len(finite) > 1 and float(finite.min()) > 0 and float(finite.max()) > _LOG_FROM * float(finite.min())
    low, high = _limits(finite, is_log, from_zero=unit in _FROM_ZERO, marks=marks and any(events.values()))
    factor, shown_unit = _scale(unit, high)
    colours = {f"#0505{i:02x}": colour_of(i) for i in range(len(RUN_COLOURS))} | {"#060606": "var(--bad)"}
    own = [*colours]
    room = 46 if names_at_end else _RIGHT
    with drawing(f"{title}, over {x_title}s", _HEIGHT, below=_BELOW, left=_LEFT, right=room, colours=colours) as (
        axes,
        drawn,
    ):
        axes.set(xlim=(left, right), ylim=(low, high))
        if is_log:
            axes.set_yscale("log")
            axes.set_ylim(low, high)
        for line in lines:
            colour = own[line.run % len(RUN_COLOURS)]
            style: dict[str, Any] = {"linestyle": line.dash, "linewidth": line.width, "alpha": line.alpha}
            (path,) = axes.plot(line.xs, line.ys, color=colour, solid_joinstyle="round", **style)
            path.set_gid(f"of-run-{line.run}")
            if int(np.isfinite(line.ys).sum()) <= 30:
                (dots,) = axes.plot(line.xs, line.ys, ".", color=colour, markersize=5 + line.width, alpha=line.alpha)
                dots.set_gid(f"of-run-{line.run}")
            gone = line.xs[~np.isfinite(line.ys)]
            if len(gone):
                (crosses,) = axes.plot(
                    gone,
                    np.full(len(gone), 0.97),
                    "x",
                    color="#060606",
                    markersize=6,
                    transform=axes.get_xaxis_transform(),
                )
                crosses.set_gid(f"of-run-{line.run}")
        if names_at_end:
            _name_lines(axes, lines, own)
        for run, happened in events.items():
            _mark(axes, own[run % len(RUN_COLOURS)], run, happened, (left, right), all_kinds=marks)
        _ticks(axes, is_log, factor)
        axes.set_xlabel(x_title, color=SOFT)
        axes.set_ylabel(shown_unit, color=SOFT)
        axes.yaxis.set_label_coords((9 - _LEFT) / (WIDTH - _LEFT - room), 0.5)  # at the edge, whatever the numbers
    svg = re.sub(r'<g id="of-run-(\d+)"', r'<g class="of-run-\1"', drawn[0])
    box = {"left": _LEFT, "width": WIDTH - _LEFT - room, "x": [left, right], "top": 1, "height": _HEIGHT}
    return f"{svg}{_data(title, unit, x_title, lines, box)}{_below(lines, is_log)}"


def _limits(finite: Any, is_log: bool, *, from_zero: bool, marks: bool) -> tuple[float, float]:
    """The ends of the vertical axis, with some room: below for marks."""
    if not len(finite):
        return 0.0, 1.0
    low, high = float(finite.min()), float(finite.max())
    if is_log:
        ratio = high / low
        return low / ratio ** (0.14 if marks else 0.06), high * ratio**0.06
    room = (high - low) * 0.07 or abs(high) * 0.1 or 1.0
    if low >= 0 and (from_zero or low < 0.35 * high):
        top = high * 1.07 or 1.0
        return (-0.09 * top if marks else 0.0), top
    return low - (2 * room if marks else room), high + room


def _scale(unit: str, high: float) -> tuple[float, str]:
    """The number by which values are divided for the axis, and the unit that they have then."""
    if unit == "MiB" and high >= 2048:
        return 1024, "GiB"
    if unit == "seconds" and high < 0.5:
        return 0.001, "milliseconds"
    return 1, unit


def _ticks(axes: Any, is_log: bool, factor: float) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    if is_log:
        low, high = axes.get_ylim()
        subs = (1.0, 2.0, 5.0) if high / low < 1e3 else (1.0,)
        axes.yaxis.set_major_locator(LogLocator(subs=subs, numticks=8))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.yaxis.set_major_locator(_Scaled(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]), factor))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value / factor)))


def _Scaled(locator: Any, factor: float) -> Any:  # noqa: N802 - makes a locator, whose class is known only in here
    """Return a locator of round numbers in the unit that is shown."""
    from matplotlib.ticker import Locator

    class Scaled(Locator):
        def __call__(self) -> Any:
            low, high = self.axis.get_view_interval()  # type: ignore[union-attr]
            return self.tick_values(low, high)

        def tick_values(self, vmin: float, vmax: float) -> Any:
            return [tick * factor for tick in locator.tick_values(vmin / factor, vmax / factor)]

    return Scaled()


def short(value: float) -> str:
    """Return a number in few letters: ``12.5k``, ``3e-05``."""
    if value == 0:
        return "0"
    for factor, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= factor:
            return f"{value / (1e3 if letter == 'k' else factor):.4g}{letter}"
    if abs(value) < 1e-3:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    return f"{value:.4g}"


def _name_lines(axes: Any, lines: Sequence[_Line], colours: Sequence[str]) -> None:
    """Write the names of lines at their ends, below each other."""
    low, high = map(float, axes.get_ylim())
    log = axes.get_yscale() == "log"

    def height(value: float) -> float:
        if log:
            return math.log(value / low) / math.log(high / low)
        return (value - low) / (high - low)

    ends = []
    for line in lines:
        known = line.ys[np.isfinite(line.ys)]
        if len(known):
            ends.append((height(float(known[-1])), line))
    ends.sort(key=lambda end: end[0])
    step, before = 13 / _HEIGHT, -1.0
    placed = []
    for at, line in ends:
        before = max(at, before + step)
        placed.append((before, line))
    over = max((at for at, _ in placed), default=0.0) - 1
    for at, line in placed:
        at -= max(over, 0.0)
        colour = colours[line.run % len(RUN_COLOURS)]
        axes.text(
            1.015, at, line.name, color=colour, va="center", fontsize=10, transform=axes.transAxes, parse_math=False
        )


def _mark(
    axes: Any, colour: str, run: int, events: Sequence[RunEvent], limits: tuple[float, float], *, all_kinds: bool
) -> None:
    """Mark events of a run: interruptions and restarts over the whole height, others at the bottom."""

    def at(*kinds: str) -> list[float]:
        found = {float(e.iteration) for e in events if e.kind in kinds and e.iteration is not None}
        return sorted(x for x in found if limits[0] <= x <= limits[1])

    artists = []
    for x in at(*_ENDS_BADLY):
        artists.append(axes.axvline(x, color="#060606", linewidth=1, linestyle=(0, (4, 3))))
    for x in at("resumed"):
        artists += axes.plot([x], [0.985], "v", color=colour, markersize=6, transform=axes.get_xaxis_transform())
    if all_kinds:
        for kinds, shape, size in ((("saved",), "^", 4.5), (("warning", "error", "save_failed"), "D", 4)):
            xs = at(*kinds)
            if xs:
                height = [0.02 + 0.035 * (run % 4)] * len(xs)
                artists += axes.plot(
                    xs,
                    height,
                    shape,
                    color=colour,
                    markersize=size,
                    transform=axes.get_xaxis_transform(),
                    clip_on=False,
                )
    for artist in artists:
        artist.set_gid(f"of-run-{run}")


def _data(title: str, unit: str, x_title: str, lines: Sequence[_Line], box: Mapping[str, Any]) -> str:
    """The points of a chart for the pointer, as JSON in a script that is no program."""
    curves = [{"run": line.run, "name": line.name, "x": _numbers(line.xs), "y": _numbers(line.ys)} for line in lines]
    text = json.dumps(
        {"title": title, "unit": unit, "xTitle": x_title, "box": box, "curves": curves}, separators=(",", ":")
    )
    return f'<script type="application/json" class="points">{text.replace("<", chr(92) + "u003c")}</script>'


def _numbers(values: Any) -> list[float | int | str | None]:
    """Numbers with six digits; NaN and infinity, which JSON does not have, as text."""
    return [
        (int(value) if value == int(value) and abs(value) < 1e15 else float(f"{value:.6g}"))
        if math.isfinite(value)
        else str(value)
        for value in map(float, values)
    ]


def _below(lines: Sequence[_Line], is_log: bool) -> str:
    """What to know of a chart, under it."""
    found = []
    if is_log:
        found.append("Logarithmic scale.")
    gone = sum(int((~np.isfinite(line.ys)).sum()) for line in lines)
    if gone:
        found.append("Crosses mark values that are NaN or infinite.")
    most = max(line.count for line in lines)
    if most > max(len(line.xs) for line in lines):
        found.append(f"Of {most:,} values the smallest and the largest of each column are drawn.")
    return f"<figcaption>{escape(' '.join(found))}</figcaption>" if found else ""
