"""Import classes and functions by their paths: ``package.module:Name``, or with dots only."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from .errors import ConfigError, suggest


class UnknownNameError(ConfigError):
    """A name for which there is no class."""


def import_path(path: str, where: str) -> Callable[..., Any]:
    """Import ``package.module:Name``."""
    module_name, _, attribute = path.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), *attribute.split("."))):
        raise UnknownNameError(f'{where}: "{path}" is not allowed, give package.module:Name')
    return _attribute(_imported(module_name, path, where), attribute.split("."), path, where)


def import_dotted(path: str, where: str) -> Callable[..., Any]:
    """Import ``package.module.Name``: modules as far as there are some, then attributes.

    A class or function comes before a module of the same name.
    """
    first, *parts = path.split(".")
    if not all(part.isidentifier() for part in (first, *parts)):
        raise UnknownNameError(f'{where}: "{path}" is not allowed, give package.module.Name')
    module = _imported(first, path, where)
    while parts:
        found = getattr(module, parts[0], None)
        if found is not None and not inspect.ismodule(found):
            break
        if found is None and not _has_module(module, parts[0]):
            break
        module = found or _imported(f"{module.__name__}.{parts[0]}", path, where)
        parts.pop(0)
    return _attribute(module, parts, path, where)


def _has_module(package: ModuleType, name: str) -> bool:
    return hasattr(package, "__path__") and importlib.util.find_spec(f"{package.__name__}.{name}") is not None


def _imported(module: str, path: str, where: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # If another module is missing, this one is there and imports it.
        is_unknown = error.name is not None and f"{module}.".startswith(f"{error.name}.")
        kind = UnknownNameError if is_unknown else ConfigError
        raise kind(f'{where}: "{path}" cannot be imported, {error}') from None


def _attribute(module: ModuleType, names: Iterable[str], path: str, where: str) -> Callable[..., Any]:
    found: Any = module
    for name in names:
        if not hasattr(found, name):
            hint = suggest(name, dir(found))
            raise UnknownNameError(f'{where}: "{path}" does not exist, {module.__name__} has no {name}{hint}')
        found = getattr(found, name)
    if not callable(found):
        raise ConfigError(f'{where}: "{path}" is no class or function')
    return found  # type: ignore[no-any-return]
