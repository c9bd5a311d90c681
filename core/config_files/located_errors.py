"""Errors about values of a configuration, with the file and line, or the option, that the value comes from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import ConfigError
from .config_file import Config


@contextmanager
def located(config: Any) -> Iterator[None]:
    """Context in which a ConfigError about a key of ``config`` gets the file and line of its value in front.

    Any other error, and any other kind of configuration, is left as it is.
    """
    try:
        yield
    except ConfigError as error:
        path = error.path
        if path[:1] == ("cfg",) and isinstance(config, Config) and "cfg" not in config:
            path = path[1:]  # the runner's argument, which is the configuration itself
        origin = config.origin(*path) if isinstance(config, Config) and path else None
        if origin is None or error.origin is not None:
            raise
        error.say_where(str(origin))
        raise
