"""Warnings for names that will go: each has the version since which it warns, the one without it, and what replaces it."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])


def warn_deprecated(what: str, *, since: str, removed_in: str, instead: str, stacklevel: int = 2) -> None:
    """Warn that ``what`` will go; a FutureWarning, because Python hides a DeprecationWarning from most users.

    Write the versions as literals: a test fails once ``removed_in`` is the version at hand, so that nothing is forgotten.

    Args:
        what: as users write it: "CheckpointHook.keep", 'strategy="fsdp1"', "flextrain train --lr".
        since: first version that warns, "1.2".
        removed_in: first version without it, the next major one, "2.0".
        instead: what to write: "use CheckpointHook.max_keep_ckpts".
        stacklevel: whose line the warning shows: 2 is the caller of the function that calls this.
    """
    text = f"{what} is deprecated since flextrain {since} and will be removed in {removed_in}: {instead}"
    warnings.warn(text, FutureWarning, stacklevel=stacklevel + 1)


def deprecated(what: str, *, since: str, removed_in: str, instead: str) -> Callable[[F], F]:
    """Return a decorator for a function or method that will go; each call warns, and works as before.

    Args:
        what, since, removed_in, instead: see ``warn_deprecated``.
    """

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def warning(*args: Any, **kwargs: Any) -> Any:
            warn_deprecated(what, since=since, removed_in=removed_in, instead=instead)
            return function(*args, **kwargs)

        return cast(F, warning)

    return decorate
