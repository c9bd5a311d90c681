"""Entry: what there is to say about one name."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.syntax import Syntax
from rich.text import Text


@dataclass(frozen=True)
class Argument:
    """An argument, an attribute, or a key of a configuration.

    Attributes:
        name: its name.
        type: its type as text, such as ``float | None``; empty if it is not annotated.
        default: its default as Python writes it; None if it must be given.
        meaning: what it means, with units.
        is_filled_in: flextrain gives it, a configuration must not.
    """

    name: str
    type: str
    default: str | None
    meaning: str
    is_filled_in: bool = False


@dataclass(frozen=True)
class Raised:
    """An exception, by name, and when it is raised."""

    name: str
    meaning: str


@dataclass(frozen=True)
class Method:
    """A public method, property or attribute of a class: its name, its signature (of a method alone), one sentence."""

    name: str
    signature: str
    summary: str


@dataclass(frozen=True)
class Entry:
    """A name with what there is to say about it.

    Attributes:
        name: what the user writes: "EMAHook", "flextrain.Hook", "strategy.zero_optimization.stage".
        kind: what it is, as text: "hook", "class", "function", "option".
        group: what it is listed under: "hooks", ..., "public names", "strategy-options".
        home: the import path, ``package.module:Name``; for an option that of the class that has it.
        summary: the first sentence.
        text: the rest of the description; paragraphs with empty lines between them.
        arguments: what it is made or called with, in order. For an option of an option: its keys.
        type: for an option, its type; as Argument has it.
        default: for an option, its default; as Argument has it.
        returns: what a function returns.
        raises: what it raises.
        example: keywords of FlexibleRunner, or Python.
        source: the paper or page behind it.
        methods: public methods, properties and attributes, for classes that users call or override.
        see_also: names of other entries.
        unavailable: why it cannot be used on this machine; empty if it can.
    """

    name: str
    kind: str
    group: str
    home: str
    summary: str
    text: str = ""
    arguments: tuple[Argument, ...] = ()
    type: str = ""
    default: str | None = None
    returns: str = ""
    raises: tuple[Raised, ...] = ()
    example: str = ""
    source: str = ""
    methods: tuple[Method, ...] = ()
    see_also: tuple[str, ...] = ()
    unavailable: str = ""

    def as_json(self) -> dict[str, Any]:
        """The entry as plain values."""
        return dataclasses.asdict(self)


# Print an entry of the reference for people.


_WIDEST = 100
"""Columns that text takes of a wide terminal: long lines are hard to read."""
_COLOURS = "ansi_dark"
"""Only colours that the terminal itself chooses."""


class _Line(NamedTuple):
    """A paragraph, indented; its further lines by ``hanging`` columns more."""

    text: Text = Text()
    indent: int = 0
    hanging: int = 0


class PrintedEntry:
    """What rich prints of an entry. A console with the attribute ``as_lines`` gets one line per argument, for grep."""

    def __init__(self, entry: Entry) -> None:
        self._entry = entry

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render all that is known, with headings."""
        as_lines = getattr(console, "as_lines", False)
        width = min(options.max_width, _WIDEST)
        for part in self._parts(as_lines):
            if isinstance(part, _Line):
                yield from [part.text] if as_lines else _wrapped(console, part, width)
            else:
                yield Padding(part, (0, 0, 0, 2), expand=False)

    def _parts(self, as_lines: bool) -> Iterator[_Line | Syntax]:
        entry = self._entry
        yield _Line(Text.assemble((entry.name, "bold"), f"  {entry.kind}"))
        if entry.home:
            yield _Line(Text(entry.home, style="dim"))
        yield _Line()
        yield _Line(_marked(entry.summary))
        if entry.type or entry.default is not None:
            yield _Line(Text(_type_and_default(entry.type, entry.default)))
        for paragraph in filter(None, entry.text.split("\n\n")):
            yield _Line()
            yield _Line(_marked(paragraph))
        if entry.unavailable and entry.unavailable not in entry.summary:
            yield _Line()
            yield _Line(Text(entry.unavailable, style="yellow"))
        yield from self._arguments(as_lines)
        if entry.returns:
            yield from _section("Returns", _marked(entry.returns))
        if entry.raises:
            yield from _section(
                "Raises", *(Text.assemble((each.name, "bold"), f": {each.meaning}") for each in entry.raises)
            )
        if entry.methods:
            yield from _section("Attributes and methods")
            for method in entry.methods:
                yield from _method(method, as_lines)
        if entry.example:
            yield from _section("Example")
            if as_lines:
                yield _Line(Text(textwrap.indent(entry.example, "  ")))
            else:
                yield Syntax(entry.example, "python", theme=_COLOURS, word_wrap=True, background_color="default")
        if entry.source:
            yield from _section("Source", Text(entry.source))
        if entry.see_also:
            names = ", ".join(name.removeprefix("flextrain.") for name in entry.see_also)
            yield _Line()
            yield _Line(Text(f"See also: {names}", style="dim"), hanging=2)

    def _arguments(self, as_lines: bool) -> Iterator[_Line]:
        own = [each for each in self._entry.arguments if not each.is_filled_in]
        given = [each.name for each in self._entry.arguments if each.is_filled_in]
        if own:
            yield from _section("Keys" if self._entry.kind.startswith(("option", "argument")) else "Arguments")
            for argument in own:
                yield from _argument(argument, as_lines)
        if given:
            yield _Line()
            yield _Line(Text(f"flextrain fills in {' and '.join(given)}.", style="dim"))


def _wrapped(console: Console, line: _Line, width: int) -> Iterator[Text]:
    for number, part in enumerate(line.text.wrap(console, width - line.indent - line.hanging)):
        part.rstrip()
        yield Text(" " * (line.indent + (line.hanging if number else 0))).append_text(part)


def _section(heading: str, *texts: Text) -> Iterator[_Line]:
    yield _Line()
    yield _Line(Text(heading, style="bold"))
    yield from (_Line(text, 2, 2) for text in texts)


def _marked(text: str) -> Text:
    """The text with what stands between backquotes in another colour, without the backquotes."""
    found = Text()
    for i, part in enumerate(text.replace("``", "`").split("`")):
        found.append(part, style="cyan" if i % 2 else "")
    return found


def _type_and_default(kind: str, default: str | None) -> str:
    must = "must be given" if default is None else f"default {default}" if default else ""
    return ", ".join(part for part in (kind, must) if part)


def _argument(argument: Argument, as_lines: bool) -> Iterator[_Line]:
    facts = _type_and_default(argument.type, argument.default)
    if as_lines:
        yield _Line(Text(f"  {argument.name}  {facts}: {argument.meaning}"))
        return
    yield _Line(Text.assemble((argument.name, "bold cyan"), "  ", (facts, "dim")), 2, 8)
    yield _Line(_marked(argument.meaning), 6)


def _method(method: Method, as_lines: bool) -> Iterator[_Line]:
    if as_lines:
        yield _Line(Text(f"  {method.name}{method.signature}: {method.summary}"))
        return
    yield _Line(Text.assemble((method.name, "bold cyan"), (method.signature, "dim")), 2, 8)
    yield _Line(_marked(method.summary), 6)
