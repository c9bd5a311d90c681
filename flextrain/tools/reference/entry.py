"""Entry: what there is to say about one name."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


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
    """A public method or property of a class: its name, its signature (empty for a property), one sentence."""

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
        methods: public methods and properties, for classes that users call or override.
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
