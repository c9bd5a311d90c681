"""The facts about runs that a report shows in tables, for HTML and Markdown alike."""

from __future__ import annotations

import datetime
import importlib.metadata
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..core.base.errors import one_line
from .curve_charts import Figure, figures, final, short
from .recorded_run import RecordedRun


def facts_of(run: RecordedRun) -> dict[str, str]:
    """Return what matters most of a run, by name; what is not known is left out."""
    return {name: text for name, text in _facts(run) if text}


def _facts(run: RecordedRun) -> Iterator[tuple[str, str]]:
    yield "state", state_of(run)
    updates = run.updates
    more = f" in {run.starts} starts" if run.starts > 1 else ""
    yield "updates", "none yet" if updates is None else f"{updates:,}{more}"
    for figure in figures([run]):
        if figure.section == "Metrics" and (found := final(figure, 0)) is not None and found.best is not None:
            at = f" at iteration {short(found.at)}" if found.at is not None else ""
            yield f"best {figure.key[1]}", f"{found.best:.6g}{at}"
    seconds = run.end.get("seconds")
    if isinstance(seconds, dict):
        times = {str(name): value for name, value in seconds.items() if isinstance(value, (int, float))}
        whole = times.pop("all", sum(times.values()))
        since = " since the last start" if run.starts > 1 else ""
        yield "time", f"{_duration(whole)}{since}"
        yield "time went into", ", ".join(f"{name} {_duration(value)}" for name, value in times.items())
    yield "speed", _speed(run)
    facts = run.start.get("facts")
    words: Mapping[str, Any] = facts if isinstance(facts, dict) else {}
    yield "strategy", str(words.get("strategy", ""))
    yield "batch", str(words.get("batch", ""))
    yield "precision", str(words.get("precision", ""))
    total, trained = run.start.get("parameters"), run.start.get("trained")
    if isinstance(total, int) and isinstance(trained, int):
        part = "" if trained == total else f", {trained:,} of them trained"
        yield "model", f"{run.start.get('model', '')}, {total:,} parameters{part}"
    yield "memory of states", str(words.get("states", ""))
    for point in importlib.metadata.entry_points(group="flextrain.report"):
        try:
            yield point.name, point.load()(run.folder)
        except Exception as error:  # of a third party, which may fail in any way
            yield point.name, f"{point.value} fails: {type(error).__name__}: {one_line(error)}"
    yield "folder", str(run.folder)


def state_of(run: RecordedRun) -> str:
    """Return how a run ended, or that it has not told of an end."""
    ends = [
        event for event in run.events if event.kind in ("finished", "failed", "stalled", "preempted", "left", "gave_up")
    ]
    if not run.is_over:
        return "running, or killed" if run.starts else "empty"
    last = ends[-1] if ends else None
    ended = str(run.end.get("ended") or "")
    if last is not None and last.kind == "finished":
        return "finished"
    said = ended or (last.text if last is not None else "")
    kind = last.kind if last is not None else "ended"
    return f"{kind}: {said}" if said else kind


def _speed(run: RecordedRun) -> str:
    """The median of all records but the first, which is slower."""
    for figure in figures([run]):
        if figure.key[1] in ("samples per second", "updates per second"):
            rates = sorted(y for y in figure.curves[0].ys[1:] or figure.curves[0].ys if math.isfinite(y))
            if rates:
                return f"{short(rates[len(rates) // 2])} {figure.key[1]} (median)"
    return ""


def _duration(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 10 else str(datetime.timedelta(seconds=round(seconds)))


def final_values(found: Sequence[Figure], runs: Sequence[RecordedRun]) -> list[tuple[str, list[str]]]:
    """Return a row for each figure: its title, and of each run the last value, and the best if that is known."""
    return [
        (figure.title + (f" ({figure.unit})" if figure.unit else ""), [_final(figure, i) for i in range(len(runs))])
        for figure in found
    ]


def _final(figure: Figure, run: int) -> str:
    values = final(figure, run)
    if values is None:
        return ""
    if values.last is None:
        return "no finite value"
    text = f"{values.last:.6g}"
    if values.best is not None and values.best != values.last:
        text += f" (best {values.best:.6g})"
    if values.nonfinite:
        text += f", {values.nonfinite:,} not finite"
    return text


def differing_settings(runs: Sequence[RecordedRun]) -> list[tuple[str, list[str]]]:
    """Return the settings that are not the same in all runs that have recorded any: key, and the value of each run."""
    names = dict.fromkeys(name for run in runs for name in run.settings)
    rows = [(name, [run.settings.get(name, "") for run in runs]) for name in names]
    return [(name, values) for name, values in rows if len({*values}) > 1]


# Runs as Markdown, for a pull request.


_MOST_ROWS = 40
_SECTIONS = ("Metrics", "Loss", "Speed", "Memory")
_MOST_LETTERS = 80


def markdown(runs: Sequence[RecordedRun]) -> str:
    """Return the key facts, the last values of the most important figures, and what differs in the configurations."""
    names = [run.name for run in runs]
    facts = [facts_of(run) for run in runs]
    keys = dict.fromkeys(key for each in facts for key in each if key != "folder")
    parts = [_table("", names, [(key, [each.get(key, "") for each in facts]) for key in keys])]
    shown = [figure for figure in figures(runs) if figure.section in _SECTIONS]
    if shown:
        parts += ["### Last values", _table("", names, final_values(shown[:_MOST_ROWS], runs))]
        if len(shown) > _MOST_ROWS:
            parts.append(f"{len(shown) - _MOST_ROWS} more figures are in the HTML report.")
    differing = differing_settings(runs) if len(runs) > 1 else []
    if differing:
        parts += ["### Settings that differ", _table("", names, differing[:_MOST_ROWS])]
        if len(differing) > _MOST_ROWS:
            parts.append(f"{len(differing) - _MOST_ROWS} more settings differ.")
    notes = [f"- {_cell(run.name)}: {_cell(note)}" for run in runs for note in run.notes]
    return "\n\n".join(filter(None, [*parts, "\n".join(notes)])) + "\n"


def _table(corner: str, heads: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    lines = [[corner, *heads], ["---"] * (len(heads) + 1), *([key, *values] for key, values in rows)]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    text = " ".join(text.split())
    text = text if len(text) <= _MOST_LETTERS else f"{text[: _MOST_LETTERS - 1]}…"
    for sign in "\\`*_<>[]|#":
        text = text.replace(sign, f"\\{sign}") if sign != "#" or text.startswith("#") else text
    return text
