"""Drawings of Matplotlib as SVG for HTML pages of light and dark screens: those of plans, and those of reports.

Colours of text and lines become variables of the page's style; widths are those of the page, on a phone a drawing shrinks.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from html import escape
from typing import Any

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
