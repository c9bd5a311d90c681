"""Let scripts that import MMEngine's runners run with flextrain's, unchanged."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from mmengine.registry import RUNNERS
from mmengine.runner._flexible_runner import FlexibleRunner as TheirFlexibleRunner
from mmengine.runner.runner import Runner as TheirRunner

from .adapted_runner import AdaptedRunner as FlexibleRunner

logger = logging.getLogger("flextrain")

_THEIRS = (TheirRunner, TheirFlexibleRunner)
_active: list[Patch] = []


class PatchedRunner(FlexibleRunner):
    """flextrain's runner in the place of MMEngine's; the log of every run says so."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger.warning(f"{_STATE}; the script asks for MMEngine's runner and gets flextrain's")


class Patch:
    """MMEngine's runners replaced by flextrain's, until ``undo``; also a context that undoes it at its end."""

    def __init__(self) -> None:
        self._replaced = list(_mentions())
        for namespace, name, _ in self._replaced:
            namespace[name] = PatchedRunner
        _active.append(self)

    def undo(self) -> None:
        """Give MMEngine's runners back their places; a second call does nothing."""
        if self in _active:
            _active.remove(self)
            for namespace, name, original in self._replaced:
                namespace[name] = original

    def __enter__(self) -> Patch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.undo()


_STATE = "flextrain.mmengine.patch() is on"


def patch() -> Patch:
    """Replace MMEngine's Runner and FlexibleRunner by flextrain's, in all modules loaded so far and in the registry.

    For trying out: ``from mmengine.runner import Runner`` in a script then gives flextrain's. Call it before the
    script's own classes are derived from a runner. Classes that are keep MMEngine's runner; the log names them.

    Returns:
        What undoes it; as a context it does so at its end. ``unpatch()`` does too.
    """
    if _active:
        return _active[-1]
    made = Patch()
    logger.warning(_STATE)
    for kind in (kind for theirs in _THEIRS for kind in theirs.__subclasses__()):
        logger.warning(
            f"flextrain.mmengine.patch(): {kind.__module__}.{kind.__name__} was derived from MMEngine's runner before, and "
            "stays what it is"
        )
    return made


def unpatch() -> None:
    """Undo ``patch()``; without it nothing happens."""
    while _active:
        _active[-1].undo()


def _mentions() -> Iterator[tuple[Any, str, Any]]:
    """(namespace, name, class) wherever a loaded module, or the registry, has one of MMEngine's runners."""
    own = {__name__}
    for module_name, module in list(sys.modules.items()):
        namespace = getattr(module, "__dict__", {})
        for name, value in list(namespace.items()) if module_name not in own else ():
            if any(value is kind for kind in _THEIRS):
                yield namespace, name, value
    for name, value in list(RUNNERS.module_dict.items()):
        if any(value is kind for kind in _THEIRS):
            yield RUNNERS.module_dict, name, value
