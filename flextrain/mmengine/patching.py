"""Let scripts that import MMEngine's runners run with flextrain's, unchanged."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from types import TracebackType
from typing import Any

from mmengine.registry import RUNNERS
from mmengine.runner._flexible_runner import FlexibleRunner as TheirFlexibleRunner
from mmengine.runner.runner import Runner as TheirRunner

from .adapted_runner import AdaptedRunner as FlexibleRunner

logger = logging.getLogger("flextrain")

_active: list[Patch] = []


class _Patched(FlexibleRunner):
    """flextrain's runner in the place of one of MMEngine's; the log of every run says so."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger.warning(f"{_STATE}; the script asks for MMEngine's runner and gets flextrain's")


class PatchedRunner(_Patched):
    """In the place of MMEngine's Runner."""


class PatchedFlexibleRunner(_Patched):
    """In the place of MMEngine's FlexibleRunner."""


# One class for each, so that a name that was imported meanwhile can be given its original back.
_PATCHED_OF: dict[Any, type[_Patched]] = {TheirRunner: PatchedRunner, TheirFlexibleRunner: PatchedFlexibleRunner}


class Patch:
    """MMEngine's runners replaced by flextrain's, until ``undo``; also a context that undoes it at its end."""

    def __init__(self) -> None:
        self._replaced = _replace(_namespaces(), _PATCHED_OF)
        _active.append(self)

    def undo(self) -> None:
        """Give MMEngine's runners back their places, also in modules loaded meanwhile; a second call does nothing."""
        if self not in _active:
            return
        _active.remove(self)
        # A namespace from the beginning may be that of a module that is in sys.modules no more.
        originals = {patched: original for original, patched in _PATCHED_OF.items()}
        _replace(chain(self._replaced, _namespaces()), originals)
        for kind in (kind for patched in _PATCHED_OF.values() for kind in patched.__subclasses__()):
            logger.warning(
                f"flextrain.mmengine.unpatch(): {kind.__module__}.{kind.__name__} was derived from flextrain's runner "
                "meanwhile, and stays what it is"
            )

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
    for kind in (kind for theirs in _PATCHED_OF for kind in theirs.__subclasses__()):
        logger.warning(
            f"flextrain.mmengine.patch(): {kind.__module__}.{kind.__name__} was derived from MMEngine's runner before, and "
            "stays what it is"
        )
    return made


def unpatch() -> None:
    """Undo ``patch()``; without it nothing happens."""
    while _active:
        _active[-1].undo()


def _namespaces() -> Iterator[dict[str, Any]]:
    """Yield those of all loaded modules but this one, and the registry's."""
    for module_name, module in list(sys.modules.items()):
        namespace = getattr(module, "__dict__", None)
        if module_name != __name__ and isinstance(namespace, dict):  # some programs put other objects there
            yield namespace
    yield RUNNERS.module_dict


def _replace(namespaces: Iterable[dict[str, Any]], replacements: Mapping[Any, Any]) -> list[dict[str, Any]]:
    """Replace classes under all their names; return the namespaces that had one."""
    changed = []
    for namespace in namespaces:
        found = {
            name: new for name, value in list(namespace.items()) for old, new in replacements.items() if value is old
        }
        namespace.update(found)
        if found:
            changed.append(namespace)
    return changed
