"""Classes of MMEngine that are given to flextrain's own runner: an error that says what to write instead."""

from __future__ import annotations

import inspect
from collections.abc import Container, Mapping
from typing import Any

from .errors import ConfigError

_THEIRS = "mmengine"
_BRIDGE = f"{__name__.partition('.')[0]}.mmengine"


def is_of_mmengine(value: Any, within: str = _THEIRS) -> bool:
    """Whether an object, or a class, has a class of MMEngine among its bases.

    Args:
        within: only classes of this package or module of MMEngine count.
    """
    kind = value if inspect.isclass(value) else type(value)
    return any(f"{base.__module__}.".startswith(f"{within}.") for base in kind.__mro__)


def refuse_foreign(value: Any, where: str, instead: str, known: Container[str] = (), within: str = _THEIRS) -> None:
    """Raise ConfigError if ``value`` is made for MMEngine's runner; flextrain.mmengine adapts what it can before.

    Args:
        value: an object or a class; a configuration is left alone, also one in MMEngine's ConfigDict.
        where: the configuration key.
        instead: flextrain's class to make a subclass of.
        known: the names of flextrain's own, of which one may have the same name.
        within: see ``is_of_mmengine``.
    """
    if isinstance(value, (Mapping, list, tuple)) or not is_of_mmengine(value, within):
        return
    kind = value if inspect.isclass(value) else type(value)
    own = f'give type="{kind.__name__}", which is flextrain\'s' if kind.__name__ in known else f"subclass {instead}"
    raise ConfigError(
        f"{where}: {kind.__name__} is made for MMEngine's runner, {own}; a project that keeps MMEngine imports FlexibleRunner from "
        f"{_BRIDGE}"
    )
