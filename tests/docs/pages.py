"""The pages of the documentation, and what code is on them.

A block with title="train.py" is written to that file, and one of language diff changes the file.

A page marks its blocks in HTML comments, which readers do not see:

    <!-- page: full, it trains for a minute -->        blocks of this page run in make test-full, and are checked in make test
    <!-- page: continues 1_script.md -->              the files of that page are there
    <!-- block: full, it trains for 20 s -->           the same for the block that follows
    <!-- block: not run, it needs a GPU -->            the block is never run, but checked
    <!-- block: raises ConfigError -->                 the block raises, and its output is the message
    <!-- block: output -->                             a text block: what the code before it has printed
    <!-- block: fresh -->                              Python begins anew in another process, for this block and those after it
    <!-- hidden
    python code                                        runs with the others
    -->
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
WORDS = 1500
MODES = ("full", "not run", "raises", "output", "fresh")
LANGUAGES = {"python", "sh", "text", "toml", "yaml", "json", "diff", "dockerfile"}
_REASONED = ("full", "not run")
_FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>```+)(?P<language>[\w+-]*)(?P<rest>[^`]*)$")
_MARK = re.compile(r"^ *<!-- (?P<kind>block|page): (?P<mode>[^,]+?)(?:, (?P<reason>.+?))? -->$")


class WrongMark(ValueError):
    """A mark or fence that means nothing, with page and line."""


@dataclass(frozen=True)
class Block:
    """Code on a page; ``line`` is that of its first line of code, counted from 1."""

    page: str
    line: int
    language: str
    code: str
    title: str = ""
    mode: str = ""
    detail: str = ""

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    """All pages that are written by hand, and the README."""
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def blocks(path: Path) -> list[Block]:
    """The code of a page, from top to bottom.

    Raises:
        WrongMark: a mark, or a language, that is not known.
    """
    text = path.read_text()
    before = re.search(r"^<!-- page: continues (\S+) -->$", text, flags=re.MULTILINE)
    files = [block for block in blocks(path.parent / before[1]) if block.title] if before else []
    return [*files, *_read(text.splitlines(), name(path))]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def _read(lines: list[str], page: str) -> Iterator[Block]:
    always, mark, number = "", ("", ""), 0
    while number < len(lines):
        line = lines[number]
        number += 1
        if re.match(r"<!-- page: continues \S+ -->$", line):
            continue
        if found := _MARK.match(line):
            given = _checked(found, f"{page}:{number}")
            if found["kind"] == "page":
                always = given[0]
            else:
                mark = given
        elif line.strip() == "<!-- hidden":
            end = next((n for n in range(number, len(lines)) if lines[n].strip() == "-->"), None)
            if end is None:
                raise WrongMark(f"{page}:{number}: the comment has no end")
            yield Block(page, number + 1, "python", "\n".join(lines[number:end]) + "\n", mode=always)
            number = end + 1
        elif re.match(r" *<!-- *(block|page|hidden)\b", line):
            raise WrongMark(f"{page}:{number}: {line.strip()} is no mark, see tests/docs/pages.py")
        elif fence := _FENCE.match(line):
            indent, close = len(fence["indent"]), fence["ticks"]
            end = next((n for n in range(number, len(lines)) if lines[n].strip() == close), None)
            if end is None:
                raise WrongMark(f"{page}:{number}: the block has no end")
            if fence["language"] not in LANGUAGES:
                raise WrongMark(
                    f'{page}:{number}: "{fence["language"]}" is no language of a block, give one of {LANGUAGES}'
                )
            title = re.search(r'title="([^"]+)"', fence["rest"])
            code = "".join(text[indent:] + "\n" for text in lines[number:end])
            mode, detail = mark if mark[0] else (always, "")
            yield Block(page, number + 1, fence["language"], code, title[1] if title else "", mode, detail)
            mark, number = ("", ""), end + 1
        elif line.strip() and mark[0]:
            raise WrongMark(f"{page}:{number}: a block was marked, and no block follows")


def _checked(found: re.Match[str], where: str) -> tuple[str, str]:
    mode, _, detail = found["mode"].partition(" ") if found["mode"].startswith("raises ") else (found["mode"], "", "")
    if mode not in (("full",) if found["kind"] == "page" else MODES):
        raise WrongMark(f"{where}: {mode} is no mark, see tests/docs/pages.py")
    if mode in _REASONED and not found["reason"]:
        raise WrongMark(f"{where}: say why, {mode}, because ...")
    return mode, detail


def words(path: Path) -> int:
    """How many words a reader sees, with code and tables."""
    return len(re.sub(r"<!--.*?-->", "", path.read_text(), flags=re.DOTALL).split())
