"""Patterns over names of a model: globs or regular expressions, each of which has to match something."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import translate
from typing import Any

from ...core.checkpoint.untrusted import one_line
from ...core.errors import ConfigError, nearest


def compiled(given: Any, where: str, *, regex: bool) -> list[tuple[str, re.Pattern[str]]]:
    """Return the patterns with what matches them.

    Args:
        given: a pattern, or a list of them.
        where: the configuration key, for messages.
        regex: whether they are regular expressions, and not globs.

    Raises:
        ConfigError: something else is given, or an expression is invalid.
    """
    patterns = [given] if isinstance(given, str) else given
    if (
        not isinstance(patterns, Sequence)
        or not patterns
        or not all(isinstance(each, str) and each for each in patterns)
    ):
        raise ConfigError(
            f'{where}: {given!r} is not allowed, give a pattern of names such as "backbone.*", or a list of them'
        )
    found = []
    for number, pattern in enumerate(patterns):
        try:
            found.append((pattern, re.compile(pattern if regex else translate(pattern))))
        except re.error as error:
            key = where if isinstance(given, str) else f"{where}[{number}]"
            raise ConfigError(f'{key}: "{pattern}" is not allowed, {one_line(error)}') from None
    return found


def matching(patterns: Iterable[tuple[str, re.Pattern[str]]], names: Sequence[str], where: str) -> set[str]:
    """Return the names that match a pattern, themselves or by a module that they are in.

    Raises:
        ConfigError: a pattern matches no name; the message has the nearest.
    """
    chosen: set[str] = set()
    for text, pattern in patterns:
        found = {name for name in names if any(pattern.fullmatch(each) for each in _outer(name))}
        if not found:
            known = dict.fromkeys(outer for name in names for outer in _outer(name))
            bare = text.strip("*.^$")
            near = nearest(bare, known) or nearest(text, known)
            hint = f', did you mean "{near}"?' if near else f", the model has {_first(known)}"
            raise ConfigError(f'{where}: "{text}" matches no parameter{hint}')
        chosen |= found
    return chosen


def _outer(name: str) -> list[str]:
    """A name and those of the modules around it."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]


def _first(names: Iterable[str]) -> str:
    listed = [name for name in names if "." not in name]
    return ", ".join(listed[:8]) + (", ..." if len(listed) > 8 else "")
