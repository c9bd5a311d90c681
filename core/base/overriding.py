"""Find the methods of this library that a user's class, or a single object, overrides."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

from .errors import ConfigError, nearest

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
    ours = _library_base(kind)
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
        own = [base for base in kind.__mro__ if base.__module__.partition(".")[0] != _LIBRARY]
        if name in getattr(thing, "__dict__", {}) or any(name in vars(base) for base in own):
            raise ConfigError(f"{where}: {kind.__name__}.{name} is never called here, {reason}")


def refuse_misspelled(kind: type, where: str) -> None:
    """Raise ConfigError if a user's class defines a method that looks like one of this library's and is never called.

    Underscores in front count as a difference: ``arrange`` is not ``_arrange``. A class that defines the library's method
    too may have such a method.
    """
    ours = _library_base(kind)
    methods = {
        name.strip("_"): name for name in dir(ours) if not name.startswith("__") and callable(getattr(ours, name))
    }
    for base in kind.__mro__[: kind.__mro__.index(ours)]:
        for name, value in vars(base).items():
            if hasattr(ours, name) or name.startswith("__") or not inspect.isfunction(value):
                continue
            meant = methods.get(nearest(name.strip("_"), methods, 0.85) or "")
            if meant is not None and not _is_new(kind, meant):
                raise ConfigError(
                    f'{where}: {kind.__name__}.{name} would never be called, did you mean "{meant}"? Else give it another name'
                )


def _library_base(kind: type) -> type:
    """The nearest of the class and its bases that this library defines."""
    return next((base for base in kind.__mro__ if base.__module__.partition(".")[0] == _LIBRARY), object)
