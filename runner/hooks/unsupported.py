"""Arguments of MMEngine's hooks that have no meaning here."""

from __future__ import annotations

from typing import Any

from ...core.errors import ConfigError

_REASONS = {
    "file_client_args": "files are written to mounted file systems only",
    "backend_args": "files are written to mounted file systems only",
    "published_keys": "a checkpoint needs no cleaning before it is shared, load_from reads only the weights in it",
}


def refuse(where: str, **arguments: Any) -> None:
    """Raise ConfigError, with the reason, if one of ``arguments`` is not None."""
    for name, value in arguments.items():
        if value is not None:
            raise ConfigError(f"{where}.{name}: has no meaning here, {_REASONS[name]}; leave it out")
