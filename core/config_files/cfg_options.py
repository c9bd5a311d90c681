"""Options of the command line, ``key.in.config=value``: how values are read, and the action for argparse."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from ..errors import ConfigError
from .origins import Origins, ValueOrigin


def parse_option(text: str, where: str = "cfg-options") -> Any:
    """Return the value that an option's text stands for.

    Numbers, ``True``, ``False`` (in any case) and ``None`` are what they are in Python, ``[a,b]`` and ``a,b`` are lists,
    ``(a,b)`` is a tuple, nested ones too. All else is a string; quotes around it are left out.

    Raises:
        ConfigError: brackets are not closed, or the text is a dict.
    """
    value = text.strip().strip("'\"").strip()
    if value.startswith("{"):
        raise ConfigError(f"{where}: {text} is not allowed, give keys with dots between them, a.b=1 for {{b: 1}} in a")
    brackets = {"(": ")", "[": "]"}
    if value[:1] in brackets and value.endswith(brackets[value[:1]]) and len(_split(value, where)) == 1:
        items = [parse_option(item, where) for item in _split(value[1:-1], where)]
        return tuple(items) if value.startswith("(") else items
    if "," in value:
        return [parse_option(item, where) for item in _split(value, where)]
    return _scalar(value)


def _split(text: str, where: str) -> list[str]:
    """The parts between commas that stand outside of brackets; a comma at the end adds none."""
    parts, depth, start = [], 0, 0
    for position, character in enumerate(text):
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(character, 0)
        if depth < 0:
            break
        if character == "," and depth == 0:
            parts.append(text[start:position])
            start = position + 1
    if depth:
        raise ConfigError(f"{where}: {text} has a bracket without its counterpart")
    return [*parts, text[start:]] if text[start:].strip() else parts


def _scalar(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), None if text == "None" else text)


def parse_options(texts: Sequence[str], flag: str = "--cfg-options") -> tuple[dict[str, Any], dict[str, Origins]]:
    """The options ``key=value`` by key, and where they come from: ``flag``.

    Raises:
        ConfigError: a text is no ``key=value``, or a key is given twice.
    """
    options: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ConfigError(f'{flag}: "{text}" is not allowed, give key=value')
        if key in options:
            raise ConfigError(f"{flag} {key}: is given twice")
        options[key] = parse_option(value, f"{flag} {key}")
    return options, {key: Origins(ValueOrigin(flag)) for key in options}


class DictAction(argparse.Action):
    """Action for argparse that collects ``KEY=VALUE ...`` in a dict, as MMEngine's does; see ``parse_option``.

    Use it with ``nargs="+"``, and give the dict to ``Config.merge_from_dict``.
    """

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Add the options to those that were given before; a later one of the same key wins."""
        options = dict(getattr(namespace, self.dest, None) or {})
        for text in [values] if isinstance(values, str) else values or ():
            try:
                options.update(parse_options([text], option_string or self.dest)[0])
            except ConfigError as error:
                raise argparse.ArgumentError(self, str(error)) from None
        setattr(namespace, self.dest, options)
