"""HTML pages in one file for light and dark screens, with drawings of Matplotlib as SVG: those of plans, and those of reports.

Colours of text and lines become variables of the page's style; widths are those of the page, on a phone a drawing shrinks.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from .core.base.errors import ConfigError
from .core.checkpoint.export.files import Pending

# Drawn as these colours, which nothing else has, and replaced by the page's.
INK, SOFT, GRID, PAPER = "#010101", "#020202", "#030303", "#040404"
_OF_THE_PAGE = {INK: "var(--ink)", SOFT: "var(--soft)", GRID: "var(--grid)", PAPER: "var(--paper)"}
WIDTH = 440
"""Of every drawing, in pixels; text is 11 pixels high."""


@contextmanager
def drawing(
    title: str,
    height: float,
    *,
    below: float,
    left: float = 4,
    right: float = 8,
    colours: Mapping[str, str] | None = None,
) -> Iterator[tuple[Any, list[str]]]:
    """Context with axes of this height in pixels and these margins, and a list to which the SVG is added at the end.

    Args:
        title: of the drawing, for those who do not see it.
        height: of the axes.
        below, left, right: the margins.
        colours: colours that are drawn, and what the page has in their place.
    """
    import matplotlib
    from matplotlib.figure import Figure

    style: Any = {
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],  # what comes with Matplotlib
        "font.size": 11,
        "hatch.linewidth": 0.6,
        "hatch.color": PAPER,
        "svg.fonttype": "none",
        "svg.hashsalt": title,
        "text.parse_math": False,
    }
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # the user's own style may ask for another font, or for LaTeX
        matplotlib.rcParams.update(style)
        whole, drawn = height + below + 2, list[str]()
        figure = Figure(figsize=(WIDTH / 72, whole / 72))
        figure.patch.set_visible(False)
        axes = figure.add_axes((left / WIDTH, below / whole, (WIDTH - left - right) / WIDTH, height / whole))
        axes.set_axisbelow(True)
        axes.grid(color=GRID, linewidth=0.8)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color(SOFT)
        axes.tick_params(length=0, labelcolor=SOFT)
        axes.patch.set_visible(False)
        yield axes, drawn
        written = io.StringIO()
        figure.savefig(written, format="svg", dpi=72, metadata={"Date": None})
        drawn.append(_for_html(written.getvalue(), title, {**_OF_THE_PAGE, **(colours or {})}))


def _for_html(svg: str, title: str, colours: Mapping[str, str]) -> str:
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    view = re.search(r'viewBox="[^"]*"', svg)
    assert view is not None
    body = re.sub(r"<[^>]*>", lambda tag: _tag_for_html(tag[0], colours), svg[svg.index(">") + 1 :])
    return f'<svg {view[0]} role="img" aria-label="{escape(title)}">{body}'


def _tag_for_html(tag: str, colours: Mapping[str, str]) -> str:
    """A tag with the page's colours, shorter numbers, and no name that another chart has too."""
    for drawn, shown in colours.items():
        tag = tag.replace(drawn, shown)
    tag = re.sub(r'^<g id="[a-z_]+\d+"', "<g", tag)
    return re.sub(r"(\d+\.\d)\d+", r"\1", tag)  # a tenth of a pixel is fine enough


# Pages


def check_file(path: Path, where: str) -> None:
    """Raise ConfigError if a file cannot be written there; ``where`` names the option."""
    folder = path.absolute().parent
    if path.is_dir():
        raise ConfigError(f"{where}: {path} is a folder, give the path of a file")
    if not folder.is_dir():
        raise ConfigError(f"{where}: there is no folder {folder} for {path.name}, make it first")
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"{where}: the folder {folder} cannot be written to, give another path")


def write_file(path: Path, text: str) -> None:
    """Write a text; there is never a part of it under this name.

    Raises:
        CheckpointError: the storage failed.
    """
    with Pending(path.absolute()) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")


def whole_page(title: str, sections: Iterable[str], *, style: str = "", script: str = "", head: str = "") -> str:
    """Return a page.

    Args:
        title: as text.
        sections: of HTML; empty ones are left out.
        style, script, head: what the page has beside what all have.
    """
    return _PAGE.substitute(
        title=escape(title),
        head=head,
        style=STYLE + style,
        body="\n".join(filter(None, sections)),
        script=f"<script>\n{script}</script>\n" if script else "",
    )


def legend_of(entries: Iterable[tuple[str, str]]) -> str:
    """Return a list of colours, each with its words."""
    items = "".join(f'<li><i style="background:{colour}"></i>{escape(words)}</li>' for colour, words in entries)
    return f'<ul class="legend">{items}</ul>'


_PAGE = Template("""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
$head<title>$title</title>
<style>
$style</style>
</head>
<body>
<main>
$body
</main>
$script</body>
</html>
""")


STYLE = """\
:root { color-scheme: light dark; --ink: #16191d; --soft: #5b6470; --grid: #e4e7eb; --paper: #ffffff; --ground: #f4f5f7;
  --good: #00694e; --bad: #a63c00; }
@media (prefers-color-scheme: dark) { :root { --ink: #e9ecef; --soft: #a3acb8; --grid: #333a43; --paper: #1b1f24;
  --ground: #121519; --good: #4fd0a7; --bad: #ff9a62; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1320px; margin: 0 auto; padding: 24px 16px 48px; }
h1 { font-size: 26px; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 0 0 10px; }
h3 { font-size: 15px; margin: 0 0 4px; overflow-wrap: anywhere; }
header p { margin: 2px 0 14px; color: var(--soft); }
dl { display: flex; flex-wrap: wrap; gap: 6px 28px; margin: 0 0 18px; }
dt, .small, figcaption { color: var(--soft); font-size: 13px; }
dd { margin: 0; font-weight: 600; overflow-wrap: anywhere; }
section { background: var(--paper); border: 1px solid var(--grid); border-radius: 10px; padding: 16px; margin: 0 0 16px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: 6px 7px; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--grid); }
thead th { color: var(--soft); font-weight: 500; font-size: 12px; }
th:first-child, .many td:nth-child(-n+3), .many thead th:nth-child(-n+3) { text-align: left; }
tbody th { position: sticky; left: 0; background: var(--paper); }
.long { display: block; width: 260px; white-space: normal; overflow-wrap: anywhere; }
tbody tr:last-child > * { border-bottom: 0; }
.yes .fits { color: var(--good); font-weight: 600; }
.no .fits, .refused td, .refused strong { color: var(--bad); font-weight: 600; }
.small { margin: 8px 0 10px; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; list-style: none; margin: 0 0 10px; padding: 0; font-size: 13px; }
.legend i { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 6px; vertical-align: -1px; }
figure { margin: 0; }
svg { display: block; width: 100%; max-width: 600px; height: auto; overflow: visible; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); gap: 0 16px; }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 460px), 1fr)); gap: 26px 32px; }
figcaption { margin-top: 6px; overflow-wrap: anywhere; }
summary { cursor: pointer; color: var(--soft); }
.remarks { margin: 0; padding-left: 18px; overflow-wrap: anywhere; }
.remarks li { margin: 3px 0; }
@media (max-width: 600px) { .long { width: 150px; } main { padding: 14px 8px 32px; } section { padding: 12px; } }
@media print { body { background: #ffffff; } section { break-inside: avoid; } }
"""
