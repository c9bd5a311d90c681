"""The version, and those of the libraries whose private parts flextrain uses, with what is said of a newer one."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from packaging.version import Version

__version__ = "1.0.0"


# The versions of the libraries whose private parts flextrain uses, and what is said with a newer one.


TRIED = {"torch": ("2.6", "2.15"), "deepspeed": ("0.19.8", "0.19.8"), "transformers": ("5.0", "5.23")}
"""The oldest and the newest version of each library with which the whole suite has passed."""

_HOMES = ("_private.py", "strategies/deepspeed/")
"""Ends and parts of the paths of the modules that use private names."""


def untried() -> Iterator[str]:
    """Yield a line for each library that this process has imported in a newer minor version than was tried."""
    for library, (oldest, newest) in TRIED.items():
        found = getattr(sys.modules.get(library), "__version__", newest)
        if Version(found).release[:2] > Version(newest).release[:2]:
            span = newest if oldest == newest else f"{oldest} to {newest}"
            yield f"{library} {found} is newer than the versions that flextrain was tried with ({span})"


def is_from_private_use(error: BaseException) -> bool:
    """Whether an error was raised in, or below, a module that uses private names of another library."""
    trace = error.__traceback__
    while trace is not None:
        path = trace.tb_frame.f_code.co_filename.replace("\\", "/")
        if path.endswith(_HOMES[0]) or _HOMES[1] in path:
            return True
        trace = trace.tb_next
    return False
