"""Functions of the user's in a strategy's options: given as they are, by name, or as ``dict(type=..., **arguments)``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from ..core.config import check_call
from ..core.errors import ConfigError
from ..core.registry import FUNCTIONS


def function_of(
    given: Any, where: str, provided: tuple[str, ...] = (), own: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Return the function that an option describes.

    Args:
        given: a function, an object to call, the name of one in FUNCTIONS or its import path, or a dict with a ``type``
            and arguments.
        where: the configuration key.
        provided: parameters that the library fills in at each call.
        own: functions and classes known by name here, besides those of FUNCTIONS. Of a class, an instance is called.

    Raises:
        ConfigError: no such function, or wrong arguments.
    """
    if callable(given) and not inspect.isclass(given):
        return given  # type: ignore[no-any-return]
    if not isinstance(given, (str, Mapping)) and not inspect.isclass(given):
        raise ConfigError(
            f"{where}: {type(given).__name__} is not allowed, give a function, its name, or dict(type=...)"
        )
    if isinstance(given, Mapping) and "type" not in given:
        raise ConfigError(f"{where}.type: missing, say which function")
    kind = given["type"] if isinstance(given, Mapping) else given
    arguments = {key: value for key, value in given.items() if key != "type"} if isinstance(given, Mapping) else {}
    own = own or {}
    key = f"{where}.type" if isinstance(given, Mapping) else where
    function: Any = own[kind] if isinstance(kind, str) and kind in own else FUNCTIONS.resolve(kind, key, own)
    if not inspect.isclass(function):
        check_call(function, arguments, where, provided)
        return functools.partial(function, **arguments) if arguments else function
    check_call(function, arguments, where)
    made = function(**arguments)
    if not callable(made):
        raise ConfigError(f"{key}: {function.__name__} makes nothing that can be called")
    return made
