"""What stands between double braces in a configuration file: the file's name, environment variables, values of bases."""

from __future__ import annotations

import copy
import os
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ConfigError, suggest
from .config_dict import ConfigDict, raw_items
from .origins import Origins, ValueOrigin

BASE = "_base_"
_ENVIRONMENT = re.compile(r"""\{\{['"]?\s*\$(\w+)\s*:\s*(\S*?)\s*['"]?\}\}""")
_REFERENCE = re.compile(r"\{\{\s*" + BASE + r"\.([\w.]+)\s*\}\}")
_FILE = re.compile(r"\{\{\s*(fileDirname|fileBasename|fileBasenameNoExtension|fileExtname)\s*\}\}")
TEMPLATE = re.compile("|".join(each.pattern for each in (_ENVIRONMENT, _REFERENCE, _FILE)))
"""Any of them, as it stands in a file."""


@dataclass
class Filled:
    """The text of a file after its templates were filled in.

    Attributes:
        text: with a string of its own for each reference to a base.
        references: the dotted path in the base, by that string.
        environment: the variables that were found, by name.
    """

    text: str
    references: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    _mark: str = field(default_factory=lambda: f"_reference_{uuid.uuid4().hex}_")

    @classmethod
    def of(cls, text: str, path: Path, *, file_names: bool = True, environment: bool = True) -> Filled:
        """Fill in the templates of the file at ``path``.

        Raises:
            ConfigError: an environment variable is not set and has no default.
        """
        found = cls(text)
        if file_names:
            names = {
                "fileDirname": path.parent.as_posix(),
                "fileBasename": path.name,
                "fileBasenameNoExtension": path.stem,
                "fileExtname": path.suffix,
            }
            found.text = _FILE.sub(lambda match: names[match[1]], found.text)
        if environment:
            found.text = _ENVIRONMENT.sub(lambda match: found._variable(match, path), found.text)
        found.text = _REFERENCE.sub(found._refer, found.text)
        return found

    def _variable(self, match: re.Match[str], path: Path) -> str:
        name, default = match[1], match[2]
        if name in os.environ:
            self.environment[name] = default = os.environ[name]
        if not default:
            line = self.text.count("\n", 0, match.start()) + 1
            raise ConfigError(
                f"{ValueOrigin(str(path), line)}: the environment variable {name} is not set, "
                f"set it or give a default, {{{{${name}:default}}}}"
            )
        return default

    def _refer(self, match: re.Match[str]) -> str:
        mark = f"{self._mark}{len(self.references)}"
        self.references[mark] = match[1]
        return f'"{mark}"'

    def resolved(self, value: Any, base: Mapping[str, Any], origins: Origins) -> Any:
        """``value`` with the base's values in place of references.

        Raises:
            ConfigError: the base has no such value, or a reference stands inside a string or for a key.
        """
        if not self.references:
            return value
        if isinstance(value, str):
            if value in self.references:
                return copy.deepcopy(looked_up(self.references[value], base, origins.origin))
            if self._mark in value:
                raise ConfigError(
                    f"{_at(origins)}a reference {{{{ {BASE}.... }}}} stands inside a string, "
                    "it must be the whole value, without quotes"
                )
        elif isinstance(value, dict):
            if any(self._mark in str(key) for key in value):
                raise ConfigError(f"{_at(origins)}a reference {{{{ {BASE}.... }}}} is no key, give it as a value")
            items = {key: self.resolved(item, base, origins.under([key])) for key, item in raw_items(value)}
            return ConfigDict(items) if type(value) in (dict, ConfigDict) else value
        elif type(value) in (list, tuple):
            return type(value)(self.resolved(item, base, origins.under([i])) for i, item in enumerate(value))
        return value


def looked_up(dotted: str, base: Mapping[str, Any], origin: ValueOrigin | None) -> Any:
    """The value of the base at a dotted path.

    Raises:
        ConfigError: there is none.
    """
    found: Any = base
    done = BASE
    for name in dotted.split("."):
        if isinstance(found, list | tuple) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, dict) and name in found:
            found = dict.__getitem__(found, name)
        else:
            hint = suggest(name, found) if isinstance(found, dict) else ""
            raise ConfigError(f'{f"{origin}: " if origin else ""}{done}: has no "{name}"{hint}')
        done += f".{name}"
    return found


def _at(origins: Origins) -> str:
    return f"{origins.origin}: " if origins.origin else ""
