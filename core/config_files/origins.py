"""Where each value of a configuration comes from: a file and line, or an option of the command line."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

Key = str | int


@dataclass(frozen=True)
class ValueOrigin:
    """Where a value was written.

    Attributes:
        source: the path of a file, or an option such as ``--cfg-options``.
        line: counted from 1; None if the source has no lines.
    """

    source: str
    line: int | None = None

    def __str__(self) -> str:
        if self.line is None and not Path(self.source).is_absolute():
            return self.source
        path = os.path.relpath(self.source)
        shown = self.source if path.startswith("..") else path
        return shown if self.line is None else f"{shown}:{self.line}"


@dataclass
class Origins:
    """The origins of a value and of all values in it, as a tree."""

    origin: ValueOrigin | None = None
    below: dict[Key, Origins] = field(default_factory=dict)

    def at(self, path: Iterable[Key]) -> ValueOrigin | None:
        """The origin of the value at ``path``, or of the nearest value around it whose origin is known."""
        found, current = self.origin, self
        for key in path:
            following = current.below.get(key)
            if following is None:
                break
            current = following
            found = current.origin or found
        return found

    def under(self, path: Iterable[Key]) -> Origins:
        """The tree at ``path``; an empty one if nothing is known."""
        current = self
        for key in path:
            if key not in current.below:
                return Origins(self.at(path))
            current = current.below[key]
        return current

    def put(self, path: Iterable[Key], origins: Origins) -> None:
        """Set the tree at ``path``."""
        *above, last = path
        current = self
        for key in above:
            current = current.below.setdefault(key, Origins(origins.origin))
        current.below[last] = origins

    def copy(self) -> Origins:
        """A copy that can be changed."""
        return Origins(self.origin, {key: value.copy() for key, value in self.below.items()})
