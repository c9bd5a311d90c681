"""Freeze: parameters that are not trained, chosen by patterns of their names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import translate
from typing import Any

from torch import nn

from ...core.base.errors import ConfigError, nearest
from ...core.base.registry import TRANSFORMS
from ...core.checkpoint.untrusted import one_line

# Patterns over names of a model: globs or regular expressions, each of which has to match something.


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


def matching(
    patterns: Iterable[tuple[str, re.Pattern[str]]], names: Sequence[str], where: str, what: str = "parameter"
) -> set[str]:
    """Return the names, each of a ``what``, that match a pattern, themselves or by a module that they are in.

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
            raise ConfigError(f'{where}: "{text}" matches no {what}{hint}')
        chosen |= found
    return chosen


def _outer(name: str) -> list[str]:
    """A name and those of the modules around it."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]


def _first(names: Iterable[str]) -> str:
    listed = [name for name in names if "." not in name]
    return ", ".join(listed[:8]) + (", ..." if len(listed) > 8 else "")


@TRANSFORMS.register_module()
class Freeze:
    """Freezes the parameters whose name, or the name of a module around them, matches a pattern.

    Args:
        patterns: a pattern of names or several, as ``"backbone"``, ``"model.layers.[01]"`` or ``"*.bias"``; each has to match.
        but: patterns of parameters to leave as they are; each has to match one that ``patterns`` has chosen.
        regex: True: these are regular expressions for whole names; False: globs.

    Raises:
        ConfigError: a pattern is invalid, or matches nothing.

    Example:
        transforms=[dict(type="Freeze", patterns=["backbone"], but=["*.bias"])]
    """

    def __init__(
        self,
        patterns: str | Sequence[str],
        but: str | Sequence[str] | None = None,
        regex: bool = False,
        *,
        where: str = "Freeze",
    ) -> None:
        if not isinstance(regex, bool):
            raise ConfigError(f"{where}.regex: {regex!r} is not allowed, give True or False")
        self._where = where
        self._patterns = compiled(patterns, f"{where}.patterns", regex=regex)
        self._but = [] if but is None else compiled(but, f"{where}.but", regex=regex)

    def __call__(self, module: nn.Module) -> None:
        """Freeze them."""
        parameters = dict(module.named_parameters(remove_duplicate=False))
        chosen = matching(self._patterns, list(parameters), f"{self._where}.patterns")
        kept = matching(self._but, sorted(chosen), f"{self._where}.but")
        if chosen == kept:
            raise ConfigError(f"{self._where}.but: leaves out all that patterns match, nothing is frozen")
        left = {id(parameters[name]) for name in kept}  # also where another of its names is chosen
        for name in chosen - kept:
            if id(parameters[name]) not in left:
                parameters[name].requires_grad_(False)
