"""The version, and those of the libraries whose private parts flextrain uses, with what is said of a newer one."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

from packaging.version import Version

__version__ = "1.0.0"

TRIED = {"torch": ("2.6", "2.15"), "deepspeed": ("0.19.8", "0.19.8"), "transformers": ("5.0", "5.24")}
"""The oldest and the newest version of each library that the tests were run with."""


def untried() -> Iterator[str]:
    """Yield a line for each library that this process has imported in a newer minor version than was tried."""
    for library, (oldest, newest) in TRIED.items():
        found = getattr(sys.modules.get(library), "__version__", newest)
        if Version(found).release[:2] > Version(newest).release[:2]:
            span = newest if oldest == newest else f"{oldest} to {newest}"
            yield f"{library} {found} is newer than the versions that flextrain was tried with ({span})"


def is_from_private_use(error: BaseException) -> bool:
    """Whether an error was raised in, or below, a module of flextrain that uses private names of another library."""
    trace = error.__traceback__
    while trace is not None:
        module = trace.tb_frame.f_globals.get("__name__", "")
        if module.startswith("flextrain.strategies.deepspeed.") or re.fullmatch(r"flextrain\..*_private", module):
            return True
        trace = trace.tb_next
    return False
