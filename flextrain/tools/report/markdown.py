"""Runs as Markdown, for a pull request."""

from __future__ import annotations

from collections.abc import Sequence

from .figures import figures
from .recorded_run import RecordedRun
from .run_facts import differing_settings, facts_of, final_values

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
