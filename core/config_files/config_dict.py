"""ConfigDict: a dict whose keys are attributes too, and whose lazy imports are imported when they are read."""

from __future__ import annotations

import copy
import importlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from ..base.errors import ConfigError

# Where each value of a configuration comes from: a file and line, or an option of the command line.


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


# What a configuration file in pure Python imports, imported only when it is used.


_reading: ContextVar[bool] = ContextVar("_reading", default=False)


def is_reading() -> bool:
    """Whether a file is being read, during which nothing is imported."""
    return _reading.get()


@contextmanager
def reading() -> Iterator[None]:
    """Context in which values of ConfigDicts are not imported when they are read."""
    token = _reading.set(True)
    try:
        yield
    finally:
        _reading.reset(token)


class LazyImport:
    """A module, class or function by its dotted path; attributes of it are lazy too.

    Args:
        dotted: such as "torch.optim.SGD".
        origin: the import statement.
    """

    def __init__(self, dotted: str, origin: ValueOrigin | None = None) -> None:
        self._dotted, self._origin = dotted, origin

    def resolve(self) -> Any:
        """Import it.

        Raises:
            ConfigError: there is no such module, or no such name in it.
        """
        first, *rest = self._dotted.split(".")
        done = first
        try:
            found: Any = importlib.import_module(first)
            for name in rest:
                done = f"{done}.{name}"
                # A module may be no attribute of its package before it is imported.
                found = getattr(found, name) if hasattr(found, name) else importlib.import_module(done)
        except ImportError as error:
            where = f"{self._origin}: " if self._origin else ""
            raise ConfigError(f'{where}"{self._dotted}" cannot be imported, {" ".join(str(error).split())}') from error
        return found

    def __getattr__(self, name: str) -> LazyImport:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return LazyImport(f"{self._dotted}.{name}", self._origin)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise ConfigError(
            f"{self._dotted}(): is not called in a configuration file, which imports it later; give dict(type=...)"
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LazyImport) and other._dotted == self._dotted

    def __hash__(self) -> int:
        return hash(self._dotted)

    def __deepcopy__(self, memo: dict[int, Any]) -> LazyImport:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __str__(self) -> str:
        return self._dotted

    __repr__ = __str__


DELETE = "_delete_"
"""Key of a dict that replaces the base's dict, instead of being merged into it."""


class ConfigDict(dict[str, Any]):
    """A dict with its keys as attributes; dicts in it, also in lists and tuples, become ConfigDicts.

    A missing attribute raises AttributeError. A value that a configuration file imports is imported when it is read.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        for given in (*args, kwargs):
            pairs: Iterable[tuple[str, Any]] = raw_items(given) if isinstance(given, Mapping) else (given or ())
            for key, value in pairs:
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

    def __or__(self, other: Any) -> Any:
        """A new ConfigDict: this one, updated by another as ``update`` does it, as in MMEngine."""
        return _updated(self, other)

    def __ror__(self, other: Any) -> Any:
        return _updated(other, self)

    def __ior__(self, other: Any) -> Any:
        self.update(other)
        return self

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
        """A copy of this level; lists and tuples in it are copied, dicts and other values are shared, as in MMEngine."""
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


def _updated(first: Any, second: Any) -> Any:
    if not isinstance(first, dict) or not isinstance(second, dict):
        return NotImplemented
    found = ConfigDict(builtin(first, lambda lazy: lazy))  # with dicts of its own, which update() changes
    found.update(second)
    return found


def _imported(value: Any) -> Any:
    return value.resolve() if isinstance(value, LazyImport) and not is_reading() else value


# Merge a configuration into another, together with where the values come from.


def path_text(path: Sequence[Key]) -> str:
    """A path as it stands in messages: ``custom_hooks[0].interval``."""
    text = ""
    for key in path:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else str(key)
    return text


def merge(
    new: Mapping[str, Any],
    old: Any,
    new_origins: Origins,
    old_origins: Origins,
    *,
    by_index: bool = False,
    above: tuple[Key, ...] = (),
) -> tuple[Any, Origins]:
    """Return ``old`` with the values of ``new``, and their origins; neither is changed.

    Where both have a dict, they are merged, unless the new one has ``_delete_=True``. Everything else is replaced.

    Args:
        by_index: whether keys such as "0" stand for items of a list.

    Raises:
        ConfigError: a dict meets a value that is no dict, or an index is not in its list.
    """
    merged: Any = copy.copy(old)
    origins = Origins(old_origins.origin, dict(old_origins.below))
    for name, value in raw_items(new):
        if name == DELETE:
            continue
        key = _index(name, old, new_origins, above) if isinstance(old, list) else name
        path = (*above, key)
        there = isinstance(old, list) or key in old
        origin = new_origins.under([name])
        if isinstance(value, dict) and there and not value.get(DELETE, False):
            before = dict.__getitem__(old, key) if isinstance(old, dict) else old[key]
            if not isinstance(before, (dict, list) if by_index else dict):
                raise ConfigError(_no_dict(path, value, before, origin, old_origins.under([key]), by_index))
            value, origin = merge(value, before, origin, old_origins.under([key]), by_index=by_index, above=path)
        else:
            value = without_delete(value)
        merged[key] = with_attributes(value)
        origins.below[key] = origin
    if origins.origin is None:
        origins.origin = new_origins.origin
    return merged, origins


def _index(name: str, items: list[Any], origins: Origins, above: tuple[Key, ...]) -> int:
    where = f"{at_origin(origins.under([name]))}{path_text(above)}"
    if not name.isdecimal():
        raise ConfigError(f'{where}: is a list, give an index from 0 to {len(items) - 1} in place of "{name}"')
    if int(name) >= len(items):
        raise ConfigError(f"{where}: has {len(items)} items, there is no index {name}")
    return int(name)


def _no_dict(path: Sequence[Key], value: Any, before: Any, new: Origins, old: Origins, by_index: bool) -> str:
    kind = type(before).__name__
    since = f" in {old.origin}" if old.origin else ""
    if by_index:
        return f'{at_origin(new)}{path_text(path)}: is a {kind}{since}, which has no key "{next(iter(value), "")}"'
    return (
        f"{at_origin(new)}{path_text(path)}: is a dict here and a {kind}{since}, which cannot be merged; "
        f"{DELETE}=True replaces it"
    )


def at_origin(origins: Origins) -> str:
    """The beginning of a message about a value: its origin and a colon, or nothing."""
    return f"{origins.origin}: " if origins.origin else ""


def nested(options: Mapping[str, Any], origins: Mapping[str, Origins]) -> tuple[ConfigDict, Origins]:
    """Options with dotted keys as a dict of dicts, with their origins.

    Raises:
        ConfigError: a key is empty, or one option stands inside another's value.
    """
    found, where = ConfigDict(), Origins()
    for dotted, value in options.items():
        origin = origins.get(dotted, Origins())
        if not all(dotted.split(".")):
            raise ConfigError(f'{at_origin(origin)}"{dotted}" is no key, give names with dots between them')
        *above, last = dotted.split(".")
        current: Any = found
        for key in above:
            current = current.setdefault(key, {})
            if not isinstance(current, dict):
                raise ConfigError(f'{at_origin(origin)}{dotted}: another option gives a value for "{key}"')
        if last in current:
            if _both_give(dict.get(current, last), value):
                raise ConfigError(f"{at_origin(origin)}{dotted}: another option gives a value in it")
            current[last].merge(value)
        else:
            current[last] = value
        where.put(dotted.split("."), origin)
    return found, where


def _both_give(first: Any, second: Any) -> bool:
    """Whether the second of two options would replace something that the first one gives."""
    if not isinstance(first, dict) or not isinstance(second, dict) or dict.get(second, DELETE):
        return True
    return any(_both_give(dict.get(first, key), value) for key, value in dict.items(second) if key in first)
