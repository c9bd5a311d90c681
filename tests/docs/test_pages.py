"""Pages are short, lead somewhere, and are found: what `mkdocs build --strict` sees too, and the README and CONTRIBUTING.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .pages import DOCS, ROOT, WORDS, name, pages, words

LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s]*)\)")
ALL = [*pages(), ROOT / "CONTRIBUTING.md"]


def anchors(path: Path) -> set[str]:
    """What GitHub and the site call the headings of a page."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", pages(), ids=name)
def test_length(page: Path) -> None:
    assert words(page) <= WORDS, f"{name(page)} has {words(page)} words: split it"


@pytest.mark.parametrize("page", ALL, ids=name)
def test_links(page: Path) -> None:
    for link in LINK.findall(re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)):
        target, _, anchor = link.partition("#")
        file = (page.parent / target).resolve() if target else page
        assert file.exists() or file.is_relative_to(DOCS / "reference"), (
            f"{name(page)} leads to {target}, which is not there"
        )
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{name(page)} leads to {link}, and there is no such heading"


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=name)
def test_navigation(page: Path) -> None:
    path = page.relative_to(DOCS).as_posix()
    listed = re.findall(rf"^ +- .*: {re.escape(path)}$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)
    assert len(listed) == 1, f"{path} stands {len(listed)} times in the navigation of mkdocs.yml"


@pytest.mark.parametrize("page", pages(), ids=name)
def test_code_is_fenced(page: Path) -> None:
    """Indented code has no language, and would not be tested."""
    before, fenced = "", False
    text = re.sub(r"<!-- hidden.*?-->", lambda found: "\n" * found[0].count("\n"), page.read_text(), flags=re.DOTALL)
    for number, line in enumerate(text.splitlines(), start=1):
        fenced ^= bool(re.match(r" *```", line))
        if line.startswith("    ") and not fenced and not line.lstrip().startswith("```"):
            assert before.startswith(("- ", "1. ", " ", "<!--")), f"{name(page)}:{number}: fence this code"
        before = line or before


def test_the_site_is_strict() -> None:
    """With --quiet, --strict finds nothing: what is not shown does not count."""
    assert "-m mkdocs build --strict\n" in (ROOT / "Makefile").read_text()
