"""Runs as one HTML file, which needs no network: curves, events, settings, pictures."""

from __future__ import annotations

import base64
import re
import time
from collections.abc import Iterable, Sequence
from html import escape

from ..pages import whole_page
from .curve_charts import RUN_COLOURS, SECTIONS, Figure, chart, chart_of_ranks, colour_of, figures
from .recorded_run import RecordedRun, RunEvent
from .run_facts import differing_settings, facts_of, final_values

# The script of a report: a pointer over a chart shows the values there.


SCRIPT = """\
for (const data of document.querySelectorAll("script.points")) {
  const figure = data.closest("figure"), svg = figure.querySelector("svg"), { box, curves, unit, xTitle } = JSON.parse(data.textContent);
  const shown = document.createElement("div");
  shown.className = "shown"; shown.hidden = true; figure.append(shown);
  const cursor = document.createElementNS("http://www.w3.org/2000/svg", "line");
  cursor.setAttribute("class", "cursor"); cursor.setAttribute("y1", box.top); cursor.setAttribute("y2", box.top + box.height);
  const nearest = (xs, x) => {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) { const middle = (low + high) >> 1; if (xs[middle] < x) low = middle; else high = middle; }
    return x - xs[low] < xs[high] - x ? low : high;
  };
  const hide = () => { shown.hidden = true; cursor.remove(); };
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("pointermove", (event) => {
    const seen = svg.getBoundingClientRect(), wide = svg.viewBox.baseVal.width / seen.width;
    const share = ((event.clientX - seen.left) * wide - box.left) / box.width;
    if (share < 0 || share > 1) return hide();
    const wanted = box.x[0] + share * (box.x[1] - box.x[0]);
    const found = curves.filter((curve) => document.getElementById("show-" + curve.run)?.checked ?? true)
      .map((curve) => [curve, nearest(curve.x, wanted)]);
    if (!found.length) return hide();
    const at = found.map(([curve, i]) => curve.x[i]).reduce((a, b) => Math.abs(a - wanted) < Math.abs(b - wanted) ? a : b);
    shown.replaceChildren();
    const head = document.createElement("b");
    head.textContent = xTitle + " " + at.toLocaleString("en"); shown.append(head);
    for (const [curve, i] of found) {
      const row = document.createElement("div"), badge = document.createElement("i");
      badge.className = "badge"; badge.style.background = "var(--run-" + curve.run % 8 + ")";
      const elsewhere = curve.x[i] === at ? "" : " (at " + curve.x[i].toLocaleString("en") + ")";
      row.append(badge, [curve.name, curve.y[i], unit].filter((text) => text !== "").join(" ") + elsewhere); shown.append(row);
    }
    const x = box.left + box.width * (at - box.x[0]) / (box.x[1] - box.x[0]);
    cursor.setAttribute("x1", x); cursor.setAttribute("x2", x); svg.append(cursor);
    shown.hidden = false;
    const room = figure.getBoundingClientRect(), left = seen.left - room.left + x / wide;
    shown.style.top = (seen.top - room.top + 4) + "px";
    shown.style.left = (left + shown.offsetWidth + 12 > room.width ? Math.max(0, left - shown.offsetWidth - 10) : left + 10) + "px";
  });
}
"""


# What the style of a report adds to that of all pages.


RUN_STYLE = """\
.badge { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 7px; vertical-align: -1px; }
.facts th, .facts td, .settings th, .settings td, .events th, .events td { text-align: left; white-space: normal;
  overflow-wrap: break-word; vertical-align: top; }
.facts thead th, .settings thead th { color: var(--ink); font-size: 13px; font-weight: 600; white-space: nowrap; }
.facts td { min-width: 170px; } .facts tbody th { font-weight: 500; color: var(--soft); white-space: nowrap; width: 1%; }
.settings td { min-width: 130px; font-family: ui-monospace, monospace; font-size: 12px; }
.settings tbody th { font-weight: 500; font-family: ui-monospace, monospace; font-size: 12px; min-width: 130px; }
.events tbody th { font-weight: 400; white-space: nowrap; } .events td:nth-child(2) { white-space: nowrap; }
.events td:nth-child(5) { min-width: 220px; }
.failed td:nth-child(3), .stalled td:nth-child(3), .preempted td:nth-child(3), .error td:nth-child(3),
.warning td:nth-child(3) { color: var(--bad); font-weight: 600; }
.runs { position: sticky; top: 0; z-index: 3; display: flex; flex-wrap: wrap; gap: 4px 18px; background: var(--ground);
  padding: 10px 4px; margin: -6px 0 10px; font-size: 14px; }
.runs label { cursor: pointer; overflow-wrap: anywhere; } .runs input { margin: 0 7px 0 0; vertical-align: -1px; }
.sections { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); gap: 0 16px;
  grid-auto-flow: dense; }
.sections > section { grid-column: 1 / -1; min-width: 0; } .sections > .single { grid-column: auto; }
.single svg { max-width: 680px; } .single .legend { min-height: 20px; }
.grid figure { position: relative; min-width: 0; }
.legend b { color: var(--soft); font-weight: 400; margin-right: 4px; }
.pictures { display: grid; grid-template-columns: repeat(auto-fill, minmax(140px, 1fr)); gap: 16px; }
.pictures img { width: 100%; image-rendering: pixelated; border: 1px solid var(--grid); border-radius: 6px; display: block; }
summary h2 { display: inline; } details[open] > summary { margin-bottom: 10px; }
.shown { position: absolute; z-index: 2; pointer-events: none; background: var(--paper); border: 1px solid var(--grid);
  border-radius: 6px; padding: 5px 9px; font-size: 12px; box-shadow: 0 3px 12px rgb(0 0 0 / 18%); white-space: nowrap;
  font-variant-numeric: tabular-nums; max-width: 100%; overflow: hidden; text-overflow: ellipsis; }
.shown b { font-weight: 600; } .cursor { stroke: var(--soft); stroke-width: 1; stroke-dasharray: 2 2; }
@media (max-width: 600px) { .facts tbody th { white-space: normal; min-width: 74px; } .facts td { min-width: 138px; }
  .facts th, .facts td { padding: 6px 5px; font-size: 12px; } .grid svg text { font-size: 13px !important; } }
"""


_MOST_CHARTS = 80
_MOST_EVENTS = 400
_MOST_PICTURE_BYTES = 12 * 2**20
_SEPARATORS = re.compile(r"(?<=\w)[/_.:]+(?=\w)")
_MARKED = frozenset({"Loss", "Metrics"})
_RANK_TITLES = (("data_time", "Waiting for data, of each rank", "seconds"), ("memory", "Memory of each rank", "MiB"))


def page(runs: Sequence[RecordedRun], *, refresh_s: int | None = None) -> str:
    """Return the page of one run or several.

    Args:
        runs: the runs, in the order of their colours.
        refresh_s: seconds after which a browser reads the page again; None: never.
    """
    found = figures(runs)
    drawn, left_out = found[:_MOST_CHARTS], found[_MOST_CHARTS:]
    by_section = {name: [one for one in drawn if one.section == name] for name in SECTIONS}
    sections = (
        _heading(runs),
        _facts(runs),
        _legend(runs),
        '<div class="sections">',
        *(_charts(name, found_here, runs) for name, found_here in by_section.items()),
        "</div>",
        _of_ranks(runs),
        _left_out(left_out),
        _finals(found, runs),
        _pictures(runs),
        _events(runs),
        _settings(runs),
    )
    refresh = "" if refresh_s is None else f'<meta http-equiv="refresh" content="{refresh_s}">\n'
    title = f"Training: {', '.join(run.name for run in runs)}"
    return whole_page(title, sections, style=RUN_STYLE + _colours(runs), script=SCRIPT, head=refresh)


def _colours(runs: Sequence[RecordedRun]) -> str:
    """The colours of the runs, and the rules that hide a run whose box is not ticked."""
    light, dark = (" ".join(f"--run-{i}: {pair[shade]};" for i, pair in enumerate(RUN_COLOURS)) for shade in (0, 1))
    hide = "".join(f"body:has(#show-{i}:not(:checked)) .of-run-{i} {{ display: none; }}\n" for i in range(len(runs)))
    return f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n{hide}"


def _heading(runs: Sequence[RecordedRun]) -> str:
    name = escape(runs[0].name) if len(runs) == 1 else f"{len(runs)} runs"
    written = time.strftime("%Y-%m-%d %H:%M:%S")
    notes = "".join(f"<p>{escape(run.name)}: {escape(note)}</p>" for run in runs for note in run.notes)
    return f"<header><h1>{name}</h1><p>Training report, written {written}</p>{notes}</header>"


def _badge(run: int) -> str:
    return f'<i class="badge" style="background:{colour_of(run)}"></i>'


def _facts(runs: Sequence[RecordedRun]) -> str:
    facts = [facts_of(run) for run in runs]
    names = dict.fromkeys(name for each in facts for name in each)
    rows = [(name, [each.get(name, "") for each in facts]) for name in names]
    return f"<section>{_table('facts', rows, runs)}</section>"


def _legend(runs: Sequence[RecordedRun]) -> str:
    if len(runs) < 2:
        return ""
    boxes = "".join(
        f'<label><input type="checkbox" id="show-{i}" checked>{_badge(i)}{escape(run.name)}</label>'
        for i, run in enumerate(runs)
    )
    return f'<nav class="runs" aria-label="Runs that are shown">{boxes}</nav>'


def _charts(section: str, found: Sequence[Figure], runs: Sequence[RecordedRun]) -> str:
    if not found:
        return ""
    marks = section in _MARKED
    drawn: dict[bool, list[str]] = {False: [], True: []}
    for figure in found:
        text = f"<figure><h3>{escape(figure.title)}</h3>{chart(figure, runs, marks=marks)}</figure>"
        drawn[figure.is_constant].append(text)
    kinds = {event.kind for run in runs for event in run.events} if marks and drawn[False] else set()
    single = ' class="single"' if len(found) == 1 else ""
    grid = f'<div class="grid">{"".join(drawn[False])}</div>' if drawn[False] else ""
    if drawn[True]:
        names = ", ".join(figure.title for figure in found if figure.is_constant)
        charts = f'<div class="grid">{"".join(drawn[True])}</div>'
        grid += f"<details><summary>Constant: {escape(names)}</summary>{charts}</details>"
    return f"<section{single}><h2>{section}</h2>{_key(kinds)}{grid}</section>"


def _key(kinds: set[str]) -> str:
    """What the marks on the curves mean, of those that there are."""
    words = (
        ("▲", "checkpoint saved", {"saved"}),
        ("◆", "warning or error in the log", {"warning", "error", "save_failed"}),
        ("┆", "failure or preemption", {"failed", "stalled", "preempted", "left", "gave_up"}),
        ("▼", "resumed", {"resumed"}),
    )
    items = "".join(f"<li><b>{sign}</b> {text}</li>" for sign, text, of in words if of & kinds)
    return f'<ul class="legend">{items}</ul>' if items else ""


def _of_ranks(runs: Sequence[RecordedRun]) -> str:
    parts = []
    for name, title, unit in _RANK_TITLES:
        for i, run in enumerate(runs):
            by_rank = {rank: curve for rank, curve in run.ranks.get(name, {}).items() if curve.xs}
            if len(by_rank) > 1:
                whose = f": {escape(run.name)}" if len(runs) > 1 else ""
                heading = f"{_badge(i)}{escape(title)}{whose}"
                drawn = chart_of_ranks(f"{title}: {run.name}", unit, i, by_rank)
                parts.append(f'<figure class="of-run-{i}"><h3>{heading}</h3>{drawn}</figure>')
    if not parts:
        return ""
    text = "Each rank has measured its own time. The others wait for the rank that waits longest for its data."
    return f'<section><h2>Ranks</h2><p class="small">{text}</p><div class="grid">{"".join(parts)}</div></section>'


def _left_out(found: Sequence[Figure]) -> str:
    if not found:
        return ""
    names = ", ".join(figure.title for figure in found[:50])
    more = f" and {len(found) - 50} more" if len(found) > 50 else ""
    text = f"No charts of {len(found)} further figures, whose last values are in the table: {names}{more}."
    return f'<section><p class="small">{escape(text)}</p></section>'


def _finals(found: Sequence[Figure], runs: Sequence[RecordedRun]) -> str:
    rows = final_values(found, runs)
    return f"<section><h2>Last values</h2>{_table('', rows, runs)}</section>" if rows else ""


def _pictures(runs: Sequence[RecordedRun]) -> str:
    shown, left_out, used = [], 0, 0
    for i, run in enumerate(runs):
        for name, step, path in run.pictures:
            try:
                size = path.stat().st_size
                if used + size > _MOST_PICTURE_BYTES:
                    left_out += 1
                    continue
                content = base64.b64encode(path.read_bytes()).decode()
            except OSError:  # removed meanwhile
                left_out += 1
                continue
            used += size
            caption = f"{_badge(i)}{escape(name)}, step {step}"
            shown.append(
                f'<figure class="of-run-{i}"><img alt="{escape(name)}" src="data:image/png;base64,{content}">'
                f"<figcaption>{caption}</figcaption></figure>"
            )
    if not shown:
        return ""
    rest = (
        f'<p class="small">{left_out} more pictures are in the folders vis_image of the runs.</p>' if left_out else ""
    )
    return f'<section><h2>Pictures</h2>{rest}<div class="pictures">{"".join(shown)}</div></section>'


def _events(runs: Sequence[RecordedRun]) -> str:
    happened = [(i, event) for i, run in enumerate(runs) for event in run.events]
    if not happened:
        return ""
    happened.sort(key=lambda pair: pair[1].when)
    shown = happened[-_MOST_EVENTS:]
    rows = "".join(_event(i, event, runs) for i, event in shown)
    rest = len(happened) - len(shown)
    text = (
        f'<p class="small">The last {len(shown)} of {len(happened):,}; events.jsonl and the logs have all.</p>'
        if rest
        else ""
    )
    heads = "".join(f"<th scope=col>{head}</th>" for head in ("time", "run", "event", "iteration", "what"))
    return (
        f'<section><details{" open" if len(shown) <= 40 else ""}><summary><h2>Events</h2></summary>{text}<div class="wide">'
        f'<table class="events"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div></details></section>'
    )


def _event(run: int, event: RunEvent, runs: Sequence[RecordedRun]) -> str:
    at = "" if event.iteration is None else f"{event.iteration:,}"
    cells = (event.kind.replace("_", " "), at, event.text[:500])
    return (
        f'<tr class="of-run-{run} {escape(event.kind)}"><th scope=row>{escape(event.when)}</th>'
        f"<td>{_badge(run)}{escape(runs[run].name)}</td>{_cells(cells)}</tr>"
    )


def _settings(runs: Sequence[RecordedRun]) -> str:
    parts = []
    if len(runs) > 1:
        rows = differing_settings(runs)
        if rows:
            parts.append(f"<h2>Settings that differ</h2>{_of_settings(rows, runs)}")
        elif any(run.settings for run in runs):
            parts.append("<h2>Settings that differ</h2><p class=small>None: the configurations are the same.</p>")
    environments = [run.record.get("environment") or {} for run in runs]
    names = dict.fromkeys(name for each in environments if isinstance(each, dict) for name in each)
    rows = [(name, [str(each.get(name, "")) for each in environments]) for name in names]
    if rows:
        parts.append(f"<h2>Environment</h2>{_of_settings(rows, runs)}")
    for i, run in enumerate(runs):
        if run.settings:
            own = _of_settings([(key, [value]) for key, value in run.settings.items()], [])
            parts.append(f"<details><summary>{_badge(i)}All settings of {escape(run.name)}</summary>{own}</details>")
    return "".join(f"<section>{part}</section>" for part in parts)


def _of_settings(rows: Iterable[tuple[str, Sequence[str]]], runs: Sequence[RecordedRun]) -> str:
    return _table("settings", [(key, [_cut(value) for value in values]) for key, values in rows], runs)


def _table(kind: str, rows: Iterable[tuple[str, Sequence[str]]], runs: Sequence[RecordedRun]) -> str:
    """A table with a column for each run; without runs it has no heads."""
    head = "".join(f"<th scope=col>{_badge(i)}{escape(run.name)}</th>" for i, run in enumerate(runs))
    head = f"<thead><tr><th></th>{head}</tr></thead>" if runs else ""
    body = "".join(f"<tr><th scope=row>{_breakable(key)}</th>{_cells(values)}</tr>" for key, values in rows)
    return f'<div class="wide"><table class="{kind}">{head}<tbody>{body}</tbody></table></div>'


def _cells(texts: Iterable[str]) -> str:
    return "".join(f"<td>{_breakable(text)}</td>" for text in texts)


def _breakable(text: str) -> str:
    """Text for a column, in which long names and paths may be broken behind their separators and nowhere else."""
    return _SEPARATORS.sub(r"\g<0><wbr>", escape(text))


def _cut(text: str, most: int = 300) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
