"""ConfigDict: a dict whose keys are attributes too, and whose lazy imports are imported when they are read."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from .lazy_imports import LazyImport, is_reading

DELETE = "_delete_"
"""Key of a dict that replaces the base's dict, instead of being merged into it."""


class ConfigDict(dict[str, Any]):
    """A dict with its keys as attributes; dicts in it, also in lists and tuples, become ConfigDicts.

    A missing attribute raises AttributeError. A value that a configuration file imports is imported when it is read.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        given = args[0] if args else {}
        pairs: Iterable[tuple[str, Any]]
        pairs = raw_items(given) if isinstance(given, Mapping) else (given or ())
        for key, value in (*pairs, *kwargs.items()):
            self[key] = value

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, with_attributes(value))

    def __getitem__(self, key: str) -> Any:
        return _imported(super().__getitem__(key))

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        try:
            del self[name]
        except KeyError:
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'") from None

    def __iter__(self) -> Iterator[str]:
        # Without it, dict(self) and **self would copy lazy imports as they are.
        return super().__iter__()

    def get(self, key: str, default: Any = None) -> Any:
        """The value of ``key``, or ``default``."""
        return self[key] if key in self else default  # noqa: SIM401 - this is what get() does

    def pop(self, key: str, default: Any = None) -> Any:
        """Remove ``key`` and return its value; ``default`` if it is missing, as in MMEngine."""
        return _imported(super().pop(key, default))

    def setdefault(self, key: str, default: Any = None) -> Any:
        """The value of ``key``, which is set to ``default`` if it is missing."""
        if key not in self:
            self[key] = default
        return self[key]

    def values(self) -> Any:
        """All values."""
        return [self[key] for key in self]

    def items(self) -> Any:
        """All pairs of key and value."""
        return [(key, self[key]) for key in self]

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Set several keys; where both have a dict, its keys are updated likewise, as in MMEngine."""
        for key, value in raw_items(ConfigDict(*args, **kwargs)):
            old = dict.get(self, key)
            if isinstance(old, ConfigDict) and isinstance(value, ConfigDict):
                old.update(value)
            else:
                self[key] = value

    def merge(self, other: Mapping[str, Any]) -> None:
        """Merge another dict into this one; ``_delete_=True`` in it replaces the dict that is here."""
        given = copy.deepcopy(ConfigDict(other))
        if given.pop(DELETE, False):
            self.clear()
        for key, value in raw_items(given):
            old = dict.get(self, key)
            if isinstance(old, ConfigDict) and isinstance(value, ConfigDict):
                old.merge(value)
            else:
                self[key] = without_delete(value)

    def copy(self) -> ConfigDict:
        """A copy of this level; dicts in it are copied, lists too, other values are shared."""
        return ConfigDict(self)

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> ConfigDict:
        other = ConfigDict()
        memo[id(self)] = other
        for key, value in raw_items(self):
            other[copy.deepcopy(key, memo)] = copy.deepcopy(value, memo)
        return other

    def __reduce_ex__(self, protocol: Any) -> Any:
        return ConfigDict, (dict(raw_items(self)),)

    def to_dict(self) -> dict[str, Any]:
        """A built-in dict of built-in dicts, lists and tuples; imported values as text: "torch.optim.SGD"."""
        return cast(dict[str, Any], builtin(self, str))


def raw_items(mapping: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The items of a mapping, with lazy imports as they are."""
    return list(dict.items(mapping)) if isinstance(mapping, dict) else list(mapping.items())


def with_attributes(value: Any) -> Any:
    """``value`` with its dicts as ConfigDicts; subclasses of dict, list and tuple stay as they are."""
    if type(value) is dict:
        return ConfigDict(value)
    if type(value) in (list, tuple):
        return type(value)(with_attributes(item) for item in value)
    return value


def builtin(value: Any, for_lazy: Any) -> Any:
    """``value`` with ConfigDicts as dicts, and ``for_lazy(import)`` for each lazy import."""
    if isinstance(value, ConfigDict) or type(value) is dict:
        return {key: builtin(item, for_lazy) for key, item in raw_items(value)}
    if type(value) in (list, tuple):
        return type(value)(builtin(item, for_lazy) for item in value)
    return for_lazy(value) if isinstance(value, LazyImport) else value


def without_delete(value: Any) -> Any:
    """``value`` without the key ``_delete_``, which has done its work, in any of its dicts."""
    if isinstance(value, dict):
        kept = {key: without_delete(item) for key, item in raw_items(value) if key != DELETE}
        return ConfigDict(kept) if type(value) in (dict, ConfigDict) else type(value)(kept)
    if type(value) in (list, tuple):
        return type(value)(without_delete(item) for item in value)
    return value


def _imported(value: Any) -> Any:
    return value.resolve() if isinstance(value, LazyImport) and not is_reading() else value
