"""Find the methods of this library that a user's class, or a single object, overrides."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from .errors import ConfigError

_LIBRARY = __name__.partition(".")[0]


def overridden(thing: Any, *names: str) -> list[str]:
    """Those of ``names`` that the object, or its class outside of this library, overrides.

    Loops leave out calls that do nothing; they may do so only if nobody has overridden them.
    """
    own = getattr(thing, "__dict__", {})
    kind: Any = type(thing)
    return [name for name in names if name in own or _is_new(kind, name)]


@functools.cache
def _is_new(kind: type, name: str) -> bool:
    ours = next((base for base in kind.__mro__ if base.__module__.partition(".")[0] == _LIBRARY), object)
    return getattr(kind, name, None) is not getattr(ours, name, None)


def refuse_unused(thing: Any, reasons: Mapping[str, str], where: str) -> None:
    """Raise ConfigError if a class defines a method that MMEngine calls and flextrain does not.

    Args:
        thing: an object or a class.
        reasons: method name to what to do instead.
        where: the configuration key.
    """
    kind = thing if isinstance(thing, type) else type(thing)
    for name, reason in reasons.items():
        if name in getattr(thing, "__dict__", {}) or any(name in vars(base) for base in kind.__mro__):
            raise ConfigError(f"{where}: {kind.__name__}.{name} is never called here, {reason}")
