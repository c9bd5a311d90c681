"""MMEngine's Config as the arguments of a runner."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from mmengine.config import Config

from ..core.errors import ConfigError, nearest

# It has all the methods of one; flextrain looks for this when it writes the configuration to a record.
Mapping.register(Config)

# Names that MMEngine's configurations have beside the runner's arguments, some of them spelled like these.
_NO_MISTAKES = {
    "data_preprocessor",
    "dataset_type",
    "model_wrapper_cfg",
    "test_pipeline",
    "train_pipeline",
    "val_pipeline",
    "vis_backends",
}
_NEAR = 0.86


def split(cfg: Any, arguments: Collection[str]) -> tuple[Config, dict[str, Any]]:
    """Return a copy of ``cfg`` as a Config, and those of its entries that are arguments of a runner.

    All other names stay in the Config, from which projects read them. Built parts are not copied.

    Raises:
        ConfigError: it is no configuration, or a name is almost that of an argument.
    """
    if not isinstance(cfg, Mapping):
        raise ConfigError(f"from_cfg: {cfg!r} is not allowed, give MMEngine's Config or a dict")
    own = _copy(cfg) if isinstance(cfg, Config) else Config(_copy(dict(cfg)))
    for name in own:
        if name not in arguments and name not in _NO_MISTAKES and not _is_imported(own[name]):
            meant = nearest(str(name), arguments, _NEAR)
            if meant is not None and meant not in own:
                raise ConfigError(f'{name}: unknown key, did you mean "{meant}"? Else give it another name')
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


def _is_imported(value: Any) -> bool:
    """Whether a name of a configuration in Python is one of its imports."""
    return callable(value) or inspect.ismodule(value)


def has_text(config: Config) -> bool:
    """Whether the configuration can be written to a file; one that holds objects cannot."""
    try:
        return bool(config.pretty_text)
    except SyntaxError:  # MMEngine formats it as Python
        return False
