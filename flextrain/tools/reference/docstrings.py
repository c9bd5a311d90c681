"""Read docstrings: the summary, the text, and the sections "Args:", "Raises:", "Returns:", "Example:", "Source:"."""

from __future__ import annotations

import inspect
import re
import textwrap
from dataclasses import dataclass, field

from .entry import Raised

_SECTION = re.compile(
    r"(Args|Arguments|Keyword Args|Attributes|Returns|Yields|Raises|Examples?|Notes?|Warning|Source|References):(?: +(\S.*))?$"
)
_ITEM = re.compile(r"(\*{0,2}[\w.]+(?:, *\*{0,2}[\w.]+)*)(?: *\(([^()]*(?:\([^()]*\)[^()]*)*)\))? *:(?:\s+(.*))?$")
_SENTENCE = re.compile(r"(?<=[.!?]) (?=[A-Z`])")


@dataclass
class Docstring:
    """What a docstring says."""

    summary: str = ""
    text: str = ""
    arguments: dict[str, str] = field(default_factory=dict)
    """Meanings by name, of arguments and attributes."""
    types: dict[str, str] = field(default_factory=dict)
    """Types by name, where the docstring has them: ``lr (float): ...``."""
    returns: str = ""
    raises: tuple[Raised, ...] = ()
    example: str = ""
    source: str = ""


def read_docstring(text: str | None) -> Docstring:
    """Read a docstring of Google's style, as flextrain and torch have it; an empty one for None."""
    found = Docstring()
    body: list[str] = []
    for name, lines in _sections(inspect.cleandoc(text or "").splitlines()):
        content = textwrap.dedent("\n".join(lines)).strip("\n")
        if name == "":
            body.append(content)
        elif name in ("Args", "Arguments", "Keyword Args", "Attributes"):
            for names, kind, meaning in _items(content):
                for each in re.split(r", *", names):
                    found.arguments.setdefault(each.lstrip("*"), meaning)
                    found.types.setdefault(each.lstrip("*"), kind)
        elif name == "Raises":
            found.raises = tuple(
                Raised(each, meaning) for names, _, meaning in _items(content) for each in re.split(r", *", names)
            )
        elif name in ("Returns", "Yields"):
            found.returns = joined(content)
        elif name.startswith("Example"):
            found.example = found.example or content
        elif name in ("Source", "References"):
            found.source = joined(content)
    paragraphs = [part for part in "\n\n".join(body).split("\n\n") if part.strip()]
    first = joined(paragraphs[0]) if paragraphs else ""
    found.summary = _SENTENCE.split(first)[0]
    rest = first[len(found.summary) :].strip()
    found.text = "\n\n".join([*([rest] if rest else []), *map(_kept, paragraphs[1:])])
    return found


def joined(text: str) -> str:
    """The text on one line."""
    return " ".join(text.split())


def _kept(paragraph: str) -> str:
    """A paragraph on one line; a list, or indented text, as it stands."""
    lines = paragraph.splitlines()
    is_list = any(line.startswith(("- ", "* ", "  ")) for line in lines)
    return paragraph if is_list else joined(paragraph)


def _sections(lines: list[str]) -> list[tuple[str, list[str]]]:
    """The lines of each section, by its name; those outside of sections under ""."""
    found: list[tuple[str, list[str]]] = [("", [])]
    for line in lines:
        header = _SECTION.match(line)
        if header:
            found.append((header[1], [header[2]] if header[2] else []))
        elif found[-1][0] and line and not line.startswith(" ") and not _continues(found[-1]):
            found.append(("", [line]))
        else:
            found[-1][1].append(line)
    return found


def _continues(section: tuple[str, list[str]]) -> bool:
    """Whether an unindented line goes on with the section: with "Source: Kingma, ..." on several lines."""
    name, lines = section
    return name == "Source" and bool(lines) and bool(lines[-1])


def _items(content: str) -> list[tuple[str, str, str]]:
    """Names, type and meaning of each item ``name (type): meaning`` with its further lines."""
    found: list[list[str]] = []
    for line in content.splitlines():
        item = None if line.startswith(" ") else _ITEM.match(line)
        if item:
            found.append([item[1], item[2] or "", item[3] or ""])
        elif found:
            found[-1][2] += f"\n{line}"
    return [(names, kind, joined(meaning)) for names, kind, meaning in found]
