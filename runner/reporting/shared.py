"""Shared: base class of objects that code finds without being given them, as in MMEngine."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

T = TypeVar("T", bound="Shared")


class Shared:
    """An object that other code finds by name, or as the current one.

    The current one belongs to the runner that runs, or is being made, in this process; if a hook runs another runner
    meanwhile, to that one. While none runs, it is the one that was made or named last and still exists.

    Args:
        name: the name for ``get_instance``.
    """

    _active: ClassVar[list[Any]]
    _named: ClassVar[dict[str, Any]]
    _of_runners: ClassVar[weakref.WeakValueDictionary[str, Any]]
    _newest: ClassVar[weakref.WeakSet[Any]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if Shared in cls.__bases__:  # subclasses of it share these
            cls._active, cls._named = [], {}
            cls._of_runners, cls._newest = weakref.WeakValueDictionary(), weakref.WeakSet()

    def __init__(self, name: str) -> None:
        self._instance_name = name

    @property
    def instance_name(self) -> str:
        """The name that ``get_instance`` finds it by."""
        return self._instance_name

    @classmethod
    def get_instance(cls: type[T], name: str, **kwargs: Any) -> T:
        """Return the object with this name; if there is none, make it from ``kwargs`` and keep it.

        A runner's has the name of the experiment, and comes before one that was made with this name.
        """
        found: T | None = cls._of_runners.get(name, cls._named.get(name))
        if found is None:
            found = cls._named[name] = cls(name=name, **kwargs)
            found._becomes_newest()
        return found

    @classmethod
    def get_current_instance(cls: type[T]) -> T:
        """Return the one of the runner that runs; see the class."""
        if cls._active:
            return cls._active[-1]  # type: ignore[no-any-return]
        newest: T | None = next(iter(cls._newest), None)
        return cls._without_runner() if newest is None else newest

    @classmethod
    def check_instance_created(cls, name: str) -> bool:
        """True if ``get_instance`` would find an object with this name."""
        return name in cls._named or name in cls._of_runners

    @classmethod
    def _without_runner(cls: type[T]) -> T:
        """Return the current object before any runner exists."""
        raise NotImplementedError

    @contextmanager
    def as_current(self) -> Iterator[None]:
        """Make this object the current one during the block."""
        self._active.append(self)
        try:
            yield
        finally:
            self._active.remove(self)  # compares by identity; runs may end in any order in threads

    def belong_to(self, name: str) -> None:
        """Give the object the name of a runner's experiment; the runner alone keeps it alive."""
        self._instance_name = name
        self._of_runners[name] = self
        self._becomes_newest()

    def _becomes_newest(self) -> None:
        self._newest.clear()
        self._newest.add(self)
