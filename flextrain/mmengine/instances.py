"""What code finds without being given it: MMEngine's default scope, and the current MMLogger and MessageHub of a run."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from mmengine.logging import MessageHub as TheirHub
from mmengine.logging import MMLogger
from mmengine.registry import DefaultScope

from ..runner.reporting import MessageHub


class RunLogger(MMLogger):  # type: ignore[misc]
    """An MMLogger that writes to the log of a run.

    Args:
        name: the experiment's name.
        logger: the run's logger, whose handlers it uses.
    """

    def __init__(self, name: str, logger: logging.Logger) -> None:
        super().__init__(name, logger_name=logger.name, log_level=logger.level)
        self.handlers = logger.handlers  # the same list, also when it changes
        self.setLevel(logger.level)
        files = (each.baseFilename for each in self.handlers if isinstance(each, logging.FileHandler))
        self._log_file = next(files, None)


class RunHub(TheirHub):  # type: ignore[misc]
    """MMEngine's MessageHub over the message hub of a run.

    Args:
        name: the experiment's name.
        hub: the run's message hub; scalars may be tensors there, which are read when a statistic is asked for.
    """

    def __init__(self, name: str, hub: MessageHub) -> None:
        super().__init__(name)
        self.hub = hub

    @property
    def log_scalars(self) -> Mapping[str, Any]:
        """All scalars by key."""
        return self.hub.log_scalars

    @property
    def runtime_info(self) -> Mapping[str, Any]:
        """All infos by key."""
        return self.hub.runtime_info

    def update_scalar(self, key: str, value: Any, count: int = 1, resumed: bool = True) -> None:
        """Append one value to a scalar."""
        self.hub.update_scalar(key, value, count, resumed)

    def update_scalars(self, log_dict: Mapping[str, Any], resumed: bool = True) -> None:
        """Append one value to each of several scalars."""
        self.hub.update_scalars(log_dict, resumed)

    def update_info(self, key: str, value: Any, resumed: bool = True) -> None:
        """Set an info."""
        self.hub.update_info(key, value, resumed)

    def pop_info(self, key: str, default: Any = None) -> Any:
        """Remove an info and return it."""
        return self.hub.pop_info(key, default)

    def get_scalar(self, key: str) -> Any:
        """Return the history of a scalar."""
        return self.hub.get_scalar(key)

    def get_info(self, key: str, default: Any = None) -> Any:
        """Return an info."""
        return self.hub.get_info(key, default)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the run's hub."""
        return self.hub.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        """Continue from the result of ``state_dict``."""
        self.hub.load_state_dict(state_dict)


def make_current(kind: Any, instance: Any) -> None:
    """Make an object the newest instance of one of MMEngine's classes, under its own name."""
    known = kind._instance_dict
    known[instance.instance_name] = instance
    known.move_to_end(instance.instance_name)


@contextmanager
def current(kind: Any, instance: Any) -> Iterator[None]:
    """Context in which an object is the newest instance of one of MMEngine's classes."""
    before = next(reversed(kind._instance_dict), None)
    make_current(kind, instance)
    try:
        yield
    finally:
        if before in kind._instance_dict:
            kind._instance_dict.move_to_end(before)


@contextmanager
def in_scope(scope: str | None) -> Iterator[None]:
    """Context with a default scope for look-ups in MMEngine's registries; None: the current one."""
    with DefaultScope.overwrite_default_scope(scope):
        yield


def set_default_scope(name: str, scope: str | None) -> None:
    """Make ``scope`` the default scope from now on, as MMEngine's runner does."""
    if scope is not None:
        DefaultScope._instance_dict.pop(name, None)
        DefaultScope.get_instance(name, scope_name=scope)
