"""Which figures of runs a report shows, in which order, and what they are called."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ...core.errors import ConfigError
from ...runner.hooks.metric_rules import infer_rule
from .recorded_run import Curve, Mode, RecordedRun

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
