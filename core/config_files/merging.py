"""Merge a configuration into another, together with where the values come from."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ConfigError
from .config_dict import DELETE, ConfigDict, raw_items, with_attributes, without_delete
from .origins import Key, Origins


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
    where = f"{_at(origins.under([name]))}{path_text(above)}"
    if not name.isdecimal():
        raise ConfigError(f'{where}: is a list, give an index from 0 to {len(items) - 1} in place of "{name}"')
    if int(name) >= len(items):
        raise ConfigError(f"{where}: has {len(items)} items, there is no index {name}")
    return int(name)


def _no_dict(path: Sequence[Key], value: Any, before: Any, new: Origins, old: Origins, by_index: bool) -> str:
    kind = type(before).__name__
    since = f" in {old.origin}" if old.origin else ""
    if by_index:
        return f'{_at(new)}{path_text(path)}: is a {kind}{since}, which has no key "{next(iter(value), "")}"'
    return (
        f"{_at(new)}{path_text(path)}: is a dict here and a {kind}{since}, which cannot be merged; "
        f"{DELETE}=True replaces it"
    )


def _at(origins: Origins) -> str:
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
            raise ConfigError(f'{_at(origin)}"{dotted}" is no key, give names with dots between them')
        *above, last = dotted.split(".")
        current: Any = found
        for key in above:
            current = current.setdefault(key, {})
            if not isinstance(current, dict):
                raise ConfigError(f'{_at(origin)}{dotted}: another option gives a value for "{key}"')
        if isinstance(value, dict) and isinstance(current.get(last), dict):
            current[last].merge(value)
        else:
            current[last] = value
        where.put(dotted.split("."), origin)
    return found, where
