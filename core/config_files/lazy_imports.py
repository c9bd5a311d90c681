"""What a configuration file in pure Python imports, imported only when it is used."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from ..errors import ConfigError
from .origins import ValueOrigin

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
