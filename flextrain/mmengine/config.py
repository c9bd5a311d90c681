"""MMEngine's Config as the arguments of a runner."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from mmengine.config import Config

from ..core.errors import ConfigError
from ..runner.from_files import other_names

# It has all the methods of one; flextrain looks for this when it writes the configuration to a record.
Mapping.register(Config)


def split(cfg: Any, arguments: Collection[str]) -> tuple[Config, dict[str, Any]]:
    """Return a copy of ``cfg`` as a Config, and those of its entries that are arguments of a runner.

    All other names stay in the Config, from which projects read them. Built parts are not copied.

    Raises:
        ConfigError: it is no configuration, or a name is almost that of an argument.
    """
    if not isinstance(cfg, Mapping):
        raise ConfigError(f"from_cfg: {cfg!r} is not allowed, give MMEngine's Config or a dict")
    own = _copy(cfg) if isinstance(cfg, Config) else Config(_copy(dict(cfg)))
    other_names(own, arguments)
    return own, {name: own[name] for name in own if name in arguments}


def _copy(cfg: Any) -> Any:
    return copy.deepcopy(cfg, {id(built): built for built in _built_parts(cfg)})


def _built_parts(value: Any) -> Iterator[Any]:
    """Objects in a configuration that are no part of its structure: models, datasets, functions."""
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _built_parts(item)
    elif type(value) in (list, tuple) and any(isinstance(item, (Mapping, list, tuple)) for item in value):
        for item in value:
            yield from _built_parts(item)
    elif not isinstance(value, (str, int, float, bool, type(None))):
        yield value


def has_text(config: Config) -> bool:
    """Whether the configuration can be written to a file; one that holds objects cannot."""
    try:
        return bool(config.pretty_text)
    except SyntaxError:  # MMEngine formats it as Python
        return False
