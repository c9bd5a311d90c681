"""Variables that a process has once: simulated ranks, which share a process, exchange them when their turns change.

Reading and writing such a variable costs nothing more than any other: a module only says, once, that it is one.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ProcessVariable:
    """An attribute of a module, class or object, or an item of a dict; ``initial`` is its value before any rank ran."""

    owner: Any
    name: str
    initial: Any

    def get(self) -> Any:
        """The value; a list or dict is copied, because the next rank shall not change this one's."""
        owner = self.owner
        return _copied(owner[self.name] if isinstance(owner, MutableMapping) else vars(owner)[self.name])

    def set(self, value: Any) -> None:
        """Put a value in its place."""
        if isinstance(self.owner, MutableMapping):
            self.owner[self.name] = _copied(value)
        else:
            setattr(self.owner, self.name, _copied(value))


PROCESS_VARIABLES: list[ProcessVariable] = []
"""Those of the modules that are imported so far."""


def each_process_has(owner: Any, *names: str) -> None:
    """Note that variables belong to a process, not to what it computes with; ``owner`` may be a module, class or dict."""
    for name in names:
        value = owner[name] if isinstance(owner, MutableMapping) else vars(owner)[name]
        PROCESS_VARIABLES.append(ProcessVariable(owner, name, _copied(value)))


def _copied(value: Any) -> Any:
    return value.copy() if type(value) in (list, dict, set) else value
